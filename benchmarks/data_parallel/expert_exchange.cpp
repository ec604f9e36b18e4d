// Measures how much of the exchanges of experts a step waits for: with W in these waits (p2 fill) and without (p2 off).
// Two replicas without a pipeline run as threads. Their link is slowed down (slow_link.h), and layers wait instead of
// computing (benchmarks/emulated.h): a block has four layers of equal F, I and W, of which the third has experts. `A`
// is the time of a micro-batch's exchanges alone, and `share` its part of a step that hides nothing.
//
//   build/release/benchmarks/data_parallel/expert_exchange
#include <cstdio>
#include <vector>

#include <CLI/CLI.hpp>

#include "benchmarks/data_parallel/slow_link.h"
#include "benchmarks/emulated.h"
#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/profile/profile.h"

namespace twobp {
namespace {

constexpr int kReplicas = 2;
constexpr int64_t kBytes = 1 << 16;  // of an exchange
constexpr int kExchanges = 4;        // of a block and micro-batch

struct Options {
  std::string schedule = "1f1b";
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
  std::vector<double> waited{};   // for experts
};

double seconds_of_exchanges(const Options& options, double share) {
  return share / (1 - share) * 3 * options.milliseconds * 1e-3;
}

// The steps of all runs alternate. Stores the measurements of replica 0.
void run_replica(World world, const Options& options, std::vector<Run>& runs) {
  const bool first = world.replica == 0;
  auto made = std::make_unique<SlowLink>(std::move(world.data[0]), 0, 0);
  SlowLink& link = *made;
  world.data[0] = std::move(made);
  EmulatedLayer layer;
  layer.forward = layer.backward_p1 = layer.backward_p2 = options.milliseconds * 1e-3 / (4 * options.blocks);
  layer.activation_bytes = layer.stash_bytes = 1 << 10;
  std::vector<EmulatedLayer> layers(static_cast<size_t>(4 * options.blocks), layer);
  for (size_t i = 2; i < layers.size(); i += 4) layers[i].exchange_bytes = kBytes;
  const ModelSpec model = emulated(layers);
  Profile profile;
  for (const LayerSpec& spec : model.layers) {
    LayerCost& cost = profile[spec.kind];
    cost.forward = cost.backward_p1 = cost.backward_p2 = layer.forward;
    cost.p2_units = 1;
  }
  PipelineOptions pipeline_options;
  pipeline_options.stages = 1;
  pipeline_options.experts = kReplicas;
  pipeline_options.threads.pin = false;
  Pipeline pipeline(model, profile, pipeline_options, std::move(world));
  int64_t step = 0;
  for (int round = -1; round < options.steps; ++round) {  // the first round warms up
    for (Run& run : runs) {
      const double exchange = seconds_of_exchanges(options, run.share) / (kExchanges * options.blocks);
      link.set_speed(0, run.share > 0 ? static_cast<double>(kBytes) / exchange : 0);
      StepRequest request;
      request.step = ++step;
      const StepReport report = pipeline.run(pipeline.plan(options.schedule, run.micro_batches, run.policy),
                                             std::vector<Fields>(static_cast<size_t>(run.micro_batches)), request);
      if (!first || round < 0) continue;
      run.seconds.push_back(report.seconds());
      run.waited.push_back(report.ranks[0].idle[static_cast<int>(IdleCause::kExperts)]);
    }
  }
}

void study(const Options& options) {
  std::vector<Run> runs;
  for (const int micro_batches : options.micro_batches) {
    for (const P2Policy policy : {P2Policy::kOff, P2Policy::kFill}) {
      runs.push_back({micro_batches, 0, policy});
      for (const double share : options.shares) runs.push_back({micro_batches, share, policy});
    }
  }
  run_worlds(make_in_process_worlds(kReplicas, 1, 0),
             [&](World world) { run_replica(std::move(world), options, runs); });
  std::printf("two replicas, %s, %d blocks, F = I = W = %.0f ms for a micro-batch; median of %d steps\n",
              options.schedule.c_str(), options.blocks, options.milliseconds, options.steps);
  std::printf("%3s %6s %8s  %-5s %9s %9s %9s %14s\n", "M", "share", "A (ms)", "p2", "step (ms)", "/ no link",
              "waits (ms)", "of the step");
  double free = 1;
  for (const Run& run : runs) {
    const double seconds = median(run.seconds);
    const double waited = median(run.waited);
    if (run.share == 0) free = seconds;
    std::printf("%3d %6.2f %8.1f  %-5s %9.1f %9.3f %9.1f %13.1f%%\n", run.micro_batches, run.share,
                seconds_of_exchanges(options, run.share) * 1e3, run.policy == P2Policy::kOff ? "off" : "fill",
                seconds * 1e3, seconds / free, waited * 1e3, 100 * waited / seconds);
  }
}

}  // namespace
}  // namespace twobp

int main(int argc, char** argv) {
  twobp::Options options;
  CLI::App app("Measures the exposed exchanges of experts");
  app.add_option("--schedule", options.schedule, "schedule of the steps");
  app.add_option("--micro-batches", options.micro_batches, "numbers of them")->delimiter(',');
  app.add_option("--shares", options.shares, "parts of a step that the exchanges take if nothing is hidden")
      ->delimiter(',');
  app.add_option("--blocks", options.blocks, "blocks of the model");
  app.add_option("--milliseconds", options.milliseconds, "F of a micro-batch");
  app.add_option("--steps", options.steps, "measured steps of each");
  CLI11_PARSE(app, argc, argv);
  try {
    twobp::study(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
