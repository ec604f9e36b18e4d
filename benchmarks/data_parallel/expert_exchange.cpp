// Measures how much of the exchanges of experts a step waits for, with W in these waits (p2 fill) and without (p2 off),
// beside the simulation. Two replicas without a pipeline run as threads, or more, of a pipeline each. Their links are
// slowed down (slow_link.h), so that the exchanges would take a `share` of a rank's work and exchanges, if nothing were
// hidden. Layers wait instead of computing (benchmarks/emulated.h): a rank has blocks of four layers of equal F, I and
// W, of which the third has experts. Alternatively, the model of a configuration runs.
//
//   build/release/benchmarks/data_parallel/expert_exchange
//   build/release/benchmarks/data_parallel/expert_exchange --ranks 4 --replicas 4 --micro-batches 4,8
//   build/release/benchmarks/data_parallel/expert_exchange --config benchmarks/data_parallel/small_experts.json
#include <algorithm>
#include <cstdio>
#include <map>
#include <numeric>
#include <vector>

#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>

#include "benchmarks/data_parallel/slow_link.h"
#include "benchmarks/emulated.h"
#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/data/data.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/profile/profile.h"
#include "twobp/schedule/simulate/for_training.h"
#include "twobp/train/build_model.h"
#include "twobp/transport/collectives.h"

namespace twobp {
namespace {

constexpr double kTimeout = 60;

struct Options {
  std::string config;
  std::string schedule = "1f1b";
  int ranks = 1;
  int replicas = 2;
  std::vector<int> micro_batches = {1, 2, 4, 8};
  std::vector<double> shares = {0.2, 0.3};
  int blocks = 4;
  double milliseconds = 40;  // of F of a micro-batch; I and W are as long
  int steps = 7;
};

struct Run {
  int micro_batches = 0;
  double share = 0;  // 0: a link that takes no time
  P2Policy policy = P2Policy::kFill;
  std::vector<double> seconds{};  // of each step
  std::vector<double> waited{};   // for experts, mean of the ranks
  Simulation simulated{};
};

// A step with p2 off on a link that takes no time.
struct Free {
  double work = 0;   // seconds of a rank
  double bytes = 0;  // that it sends to each other replica
  double w = 0;      // seconds of W
};

struct Study {
  std::vector<Run> runs;
  std::map<int, Free> free;  // by the number of micro-batches
};

double seconds_of_exchanges(const Free& free, double share) {
  return share / (1 - share) * free.work;
}

struct Subject {
  ModelSpec model;
  Profile profile;
  Fields fields;
};

Subject subject_of(const Options& options, int replica) {
  Subject subject;
  if (!options.config.empty()) {
    const Config config = load_config(options.config, {});
    subject.model = build_model(config, {options.replicas, replica});
    const DataSplit data = open_data(config.data, config.model.input(), config.train.seed);
    std::vector<int64_t> first(static_cast<size_t>(config.pipeline.micro_batch_size));
    std::iota(first.begin(), first.end(), replica * config.pipeline.micro_batch_size);
    subject.fields = data.train->read(first, 0);
    at::set_num_threads(1);
    subject.profile = measure_profile(subject.model, subject.fields);
    return subject;
  }
  EmulatedLayer layer;
  layer.forward = layer.backward_p1 = layer.backward_p2 = options.milliseconds * 1e-3 / (4 * options.blocks);
  layer.activation_bytes = layer.stash_bytes = 1 << 10;
  layer.replicas = options.replicas;
  std::vector<EmulatedLayer> layers(static_cast<size_t>(4 * options.blocks * options.ranks), layer);
  for (size_t i = 2; i < layers.size(); i += 4) layers[i].exchange_bytes = 1 << 16;
  subject.model = emulated(layers);
  for (size_t i = 0; i < layers.size(); ++i) {
    LayerCost& cost = subject.profile[subject.model.layers[i].kind];
    cost.forward = cost.backward_p1 = cost.backward_p2 = layer.forward;
    cost.p2_units = 1;
    cost.forward_to_experts = cost.forward_from_experts = cost.p1_to_experts = cost.p1_from_experts =
        static_cast<double>(layers[i].exchange_bytes);
  }
  return subject;
}

// The mean of the ranks' waits for experts.
template <typename Ranks>
double waited_of(const Ranks& ranks) {
  double sum = 0;
  for (const auto& rank : ranks) sum += rank.idle[static_cast<int>(IdleCause::kExperts)];
  return sum / static_cast<double>(ranks.size());
}

// The steps of all runs alternate. Stores the measurements of replica 0.
void run_replica(World world, const Options& options, Study& study) {
  const bool first = world.replica == 0;
  std::vector<SlowLink*> links;
  for (auto& data : world.data) {
    auto made = std::make_unique<SlowLink>(std::move(data), 0, 0);
    links.push_back(made.get());
    data = std::move(made);
  }
  const Subject subject = subject_of(options, world.replica);
  PipelineOptions pipeline_options;
  pipeline_options.stages = options.ranks;
  pipeline_options.experts = options.replicas;
  pipeline_options.threads.pin = false;
  Pipeline pipeline(subject.model, subject.profile, pipeline_options, std::move(world));
  int64_t step = 0;
  // The profile of emulated layers has no bytes, so it gives no cap.
  const auto plan_of = [&](int micro_batches, P2Policy policy) {
    return pipeline.plan(options.schedule, micro_batches, policy, {P2Batching::kLoop, MemoryCap::none()});
  };
  const auto run_step = [&](int micro_batches, P2Policy policy) {
    StepRequest request;
    request.step = ++step;
    request.loss.weight = 1e-3;
    return pipeline.run(plan_of(micro_batches, policy),
                        std::vector<Fields>(static_cast<size_t>(micro_batches), subject.fields), request);
  };
  for (const int micro_batches : options.micro_batches) {
    std::vector<double> work;
    std::vector<double> w;
    double bytes = 0;
    for (int i = 0; i < 4; ++i) {  // the first warms up
      const double before = links[0]->sent_bytes();
      const StepReport report = run_step(micro_batches, P2Policy::kOff);
      bytes = (links[0]->sent_bytes() - before) / (options.replicas - 1);
      if (i == 0) continue;
      work.push_back(report.ranks[0].busy);
      w.push_back(report.stages[0].backward_p2);
    }
    if (first) study.free[micro_batches] = {median(work), bytes, median(w)};
  }
  barrier(*pipeline.world().processes, kTimeout);  // both know the speeds
  for (int round = 0; round < options.steps; ++round) {
    for (Run& run : study.runs) {
      const Free& free = study.free.at(run.micro_batches);
      const double speed = run.share > 0 ? free.bytes / seconds_of_exchanges(free, run.share) : 0;
      for (SlowLink* link : links) link->set_speed(0, speed);
      const StepReport report = run_step(run.micro_batches, run.policy);
      if (!first) continue;
      run.seconds.push_back(report.seconds());
      run.waited.push_back(waited_of(report.ranks));
      if (round > 0) continue;
      SimulationOptions simulation = in_process_simulation();
      simulation.data_parallel.exchange_bytes_per_second = speed;
      run.simulated =
          simulate(plan_of(run.micro_batches, run.policy).schedule, profiled_costs(pipeline.layer_costs()), simulation);
    }
  }
}

void print(const Options& options, const Study& study) {
  std::printf("%d replicas, %d ranks, %s, %s; median of %d steps\n", options.replicas, options.ranks,
              options.schedule.c_str(), options.config.empty() ? "emulated layers" : options.config.c_str(),
              options.steps);
  std::printf("%3s %6s %14s  %-5s %9s %10s %10s %12s | %9s %10s %9s\n", "M", "share", "exchanges (ms)", "p2",
              "step (ms)", "/ no link", "waits (ms)", "of the step", "simulated", "waits", "max(0, A - W)");
  double free = 1;
  for (const Run& run : study.runs) {
    const double seconds = median(run.seconds);
    const double waited = median(run.waited);
    if (run.share == 0) free = seconds;
    const Free& alone = study.free.at(run.micro_batches);
    const double exchanges = seconds_of_exchanges(alone, run.share);
    const double simulated = run.simulated.step_seconds;
    std::printf("%3d %6.2f %14.1f  %-5s %9.1f %10.3f %10.1f %11.1f%% | %9.1f %9.1f%% %8.1f%%\n", run.micro_batches,
                run.share, exchanges * 1e3, run.policy == P2Policy::kOff ? "off" : "fill", seconds * 1e3,
                seconds / free, waited * 1e3, 100 * waited / seconds, simulated * 1e3,
                100 * waited_of(run.simulated.ranks) / simulated, 100 * std::max(0.0, exchanges - alone.w) / seconds);
  }
}

void measure(const Options& options) {
  Study study;
  for (const int micro_batches : options.micro_batches) {
    for (const P2Policy policy : {P2Policy::kOff, P2Policy::kFill}) {
      study.runs.push_back({micro_batches, 0, policy});
      for (const double share : options.shares) study.runs.push_back({micro_batches, share, policy});
    }
  }
  run_worlds(make_in_process_worlds(options.replicas, options.ranks, 0),
             [&](World world) { run_replica(std::move(world), options, study); });
  print(options, study);
}

}  // namespace
}  // namespace twobp

int main(int argc, char** argv) {
  twobp::Options options;
  CLI::App app("Measures the exposed exchanges of experts");
  app.add_option("--config", options.config, "model of experts in place of emulated layers");
  app.add_option("--schedule", options.schedule, "schedule of the steps");
  app.add_option("--ranks", options.ranks, "ranks of each replica's pipeline");
  app.add_option("--replicas", options.replicas, "replicas that share the experts");
  app.add_option("--micro-batches", options.micro_batches, "numbers of them")->delimiter(',');
  app.add_option("--shares", options.shares, "parts of a step that the exchanges take if nothing is hidden")
      ->delimiter(',');
  app.add_option("--blocks", options.blocks, "blocks of each emulated rank");
  app.add_option("--milliseconds", options.milliseconds, "F of its micro-batch");
  app.add_option("--steps", options.steps, "measured steps of each");
  CLI11_PARSE(app, argc, argv);
  try {
    twobp::measure(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
