// Measures how long a step waits for the gradient sums of data parallelism. It compares standard backward, 2BP that
// runs the remaining W in queue order, 2BP that runs it in bucket order, and streamed gradients. The replicas of a
// pipeline run as threads. They share one memory, so their links are slowed down (slow_link.h). Layers wait instead of
// computing (benchmarks/emulated.h), so that more ranks than cores keep time. Alternatively, the model of a
// configuration runs. Each measured figure stands next to the simulated one for the same costs.
//
//   build/release/benchmarks/data_parallel/exposed_communication --json table.json
//   build/release/benchmarks/data_parallel/exposed_communication --ranks 1 --schedules 1f1b --shards
#include <algorithm>
#include <cstdio>
#include <mutex>
#include <numeric>

#include <ATen/Parallel.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "apps/json_report.h"
#include "benchmarks/data_parallel/slow_link.h"
#include "benchmarks/emulated.h"
#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/core/text.h"
#include "twobp/data/data.h"
#include "twobp/pipeline/executor/rank_executor.h"
#include "twobp/pipeline/gradient_reducer.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/profile/profile.h"
#include "twobp/pipeline/stage.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/simulate/simulate.h"
#include "twobp/train/build_model.h"
#include "twobp/train/update/optimizer_shards.h"

namespace twobp {
namespace {

using nlohmann::json;

struct Options {
  std::vector<std::string> schedules = {"gpipe", "1f1b", "zb-v"};
  std::vector<double> speeds = {0.5, 1, 2, 4};
  int ranks = 2;
  int replicas = 2;
  int micro_batches = 0;  // 0: twice the ranks
  int layers = 8;         // per rank
  double milliseconds = 16;
  double latency = 50e-6;
  int64_t gradient_bytes = 64 << 10;  // per layer
  int buckets = 0;                    // layers per bucket; 0: one
  bool shards = false;                // each replica needs the sums of its share alone
  int steps = 5;
  std::string config;
  std::string json_file;
};

struct Method {
  const char* name;
  P2Policy policy;
  P2Order order;
  bool streams = false;
};

std::vector<Method> methods_of(const NamedSchedule& named) {
  std::vector<Method> methods = {{"standard", P2Policy::kOff, P2Order::kBucket}};
  if (named.places_p2) {  // this leaves little W for the end
    methods.push_back({"placed, oldest", P2Policy::kPlaced, P2Order::kOldest});
    methods.push_back({"placed, bucket", P2Policy::kPlaced, P2Order::kBucket});
  }
  methods.push_back({"fill, oldest", P2Policy::kFill, P2Order::kOldest});
  methods.push_back({"fill, bucket", P2Policy::kFill, P2Order::kBucket});
  methods.push_back({"streamed", P2Policy::kFill, P2Order::kBucket, /*streams=*/true});
  return methods;
}

// A model, the costs of its layers and its input.
struct Subject {
  ModelSpec model;
  Profile profile;
  std::vector<int> split;
  Fields fields;
  double loss_weight = 1;
  double bucket_bytes = 1;
};

struct Measured {
  double seconds = 0;           // of one step
  std::vector<double> exposed;  // by rank, seconds
  double longest() const { return *std::max_element(exposed.begin(), exposed.end()); }
  double mean() const {
    return std::accumulate(exposed.begin(), exposed.end(), 0.0) / static_cast<double>(exposed.size());
  }
};

// One method on one link. The steps of all runs alternate.
struct Run {
  Method method;
  double bytes_per_second = 0;
  std::vector<Measured> steps;
  Measured median() const {
    Measured middle;
    const auto of = [&](const std::function<double(const Measured&)>& what) {
      std::vector<double> values;
      for (const Measured& step : steps) values.push_back(what(step));
      return twobp::median(values);
    };
    middle.seconds = of([](const Measured& m) { return m.seconds; });
    for (size_t rank = 0; rank < steps[0].exposed.size(); ++rank)
      middle.exposed.push_back(of([&](const Measured& m) { return m.exposed[rank]; }));
    return middle;
  }
};

std::vector<std::unique_ptr<GradientReducer>> reducers_of(Pipeline& pipeline, int64_t bucket_bytes, bool shards) {
  std::vector<std::unique_ptr<GradientReducer>> reducers(pipeline.ranks());
  pipeline.on_ranks([&](int rank) {
    std::vector<GradientReducer::Item> items;
    for (const auto& stage : pipeline.rank(rank).stages()) {
      for (int i = 0; i < stage->layer_count(); ++i) {
        for (Parameter* parameter : stage->parameters(i)) {
          if (parameter->trainable()) items.push_back({parameter, stage->index(), i, stage->layer_name(i)});
        }
      }
    }
    std::vector<UpdateCost> costs;
    for (const auto& item : items) costs.push_back({item.parameter->numel()});
    const std::vector<std::vector<Cut>> cuts = share_out(costs, pipeline.world().replicas);
    for (size_t i = 0; i < items.size() && shards; ++i) items[i].cuts = cuts[i];
    reducers[rank] = std::make_unique<GradientReducer>(*pipeline.world().data[rank], std::move(items), bucket_bytes);
    pipeline.rank(rank).sum_gradients_with(reducers[rank].get());
  });
  return reducers;
}

// The update sums the gradients and forgets them.
class SumsAlone : public StepUpdate {
 public:
  SumsAlone(Pipeline& pipeline, const std::vector<std::unique_ptr<GradientReducer>>& reducers, double timeout)
      : pipeline_(pipeline), reducers_(reducers), timeout_(timeout) {}
  void apply(int, const std::vector<Parameter*>& parameters) override {
    for (Parameter* parameter : parameters) parameter->forget_grad();
  }
  std::vector<Waited> run(int rank) override {
    std::vector<Waited> waits;
    reducers_[rank]->finish({timeout_, &waits});
    for (const auto& stage : pipeline_.rank(rank).stages()) {
      for (int i = 0; i < stage->layer_count(); ++i) {
        for (Parameter* parameter : stage->parameters(i)) parameter->forget_grad();
      }
    }
    return waits;
  }
  Settled settle(int) override { return {}; }

 private:
  Pipeline& pipeline_;
  const std::vector<std::unique_ptr<GradientReducer>>& reducers_;
  double timeout_;
};

struct Study {
  std::vector<Run> runs;
  std::vector<std::vector<LayerCost>> costs;   // by stage
  std::vector<std::vector<double>> gradients;  // bytes, by stage and layer
  std::vector<StageCost> measured;             // from the steps without a bandwidth limit
};

// Runs every method with kept or with streamed gradients on every link, alternating, on all replicas. Stores the
// measurements of replica 0.
void run_replica(World world, const NamedSchedule& named, const Subject& subject, const Options& options,
                 int micro_batches, bool streams, Study& study) {
  const int replica = world.replica;
  std::vector<SlowLink*> links;
  for (auto& end : world.data) {
    auto link = std::make_unique<SlowLink>(std::move(end), options.latency, 0);
    links.push_back(link.get());
    end = std::move(link);
  }
  const int stages = options.ranks * usual_stages_per_rank(named.placement);
  PipelineOptions pipeline_options;
  pipeline_options.stages = stages;
  pipeline_options.split = subject.split;
  pipeline_options.rank_of_stage = place_stages(named.placement, stages, options.ranks);
  pipeline_options.threads.pin = false;  // ranks of all replicas share the cores
  Pipeline pipeline(subject.model, subject.profile, pipeline_options, std::move(world));
  if (streams) pipeline.stream_gradients(std::vector<bool>(static_cast<size_t>(stages), true));
  const auto reducers = reducers_of(pipeline, static_cast<int64_t>(subject.bucket_bytes), options.shards);
  const std::vector<Fields> batch(micro_batches, subject.fields);
  if (replica == 0 && !streams) {
    study.costs = pipeline.layer_costs();
    for (int s = 0; s < stages; ++s) {
      auto& layers = study.gradients.emplace_back();
      for (int i = 0; i < pipeline.stage(s).layer_count(); ++i) {
        double bytes = 0;
        for (const Parameter* parameter : pipeline.stage(s).parameters(i))
          bytes += parameter->trainable() ? static_cast<double>(parameter->grad.nbytes()) : 0;
        layers.push_back(bytes);
      }
    }
  }
  for (int round = -1; round < options.steps; ++round) {  // the first round warms up
    for (size_t r = 0; r < study.runs.size(); ++r) {
      const Method& method = study.runs[r].method;
      if (method.streams != streams) continue;
      const StepPlan plan =
          pipeline.plan(std::string(named.name), micro_batches, method.policy, {P2Batching::kLoop, 0, method.order});
      for (SlowLink* link : links) link->set_speed(options.latency, study.runs[r].bytes_per_second);
      StepRequest step;
      step.step = (round + 1) * static_cast<int64_t>(study.runs.size()) + static_cast<int64_t>(r) + 1;
      step.first_micro_batch = int64_t{replica} * micro_batches;
      step.loss.weight = subject.loss_weight;
      step.update = std::make_shared<SumsAlone>(pipeline, reducers, PipelineOptions{}.timeout);
      const StepReport report = pipeline.run(plan, batch, step);
      if (replica != 0 || round < 0) continue;
      Measured measured;
      measured.seconds = report.seconds();
      for (const RankTimes& times : report.ranks) measured.exposed.push_back(times.exposed);
      study.runs[r].steps.push_back(std::move(measured));
      if (study.runs[r].bytes_per_second == 0 && method.policy == P2Policy::kOff)
        study.measured = measured_costs(study.costs, pipeline.rank_of_stage(), report);
    }
  }
  for (int rank = 0; rank < options.ranks; ++rank) pipeline.rank(rank).sum_gradients_with(nullptr);
}

Subject emulated_subject(const NamedSchedule& named, const Options& options) {
  const int stages = options.ranks * usual_stages_per_rank(named.placement);
  const int per_stage = options.layers / usual_stages_per_rank(named.placement);
  TWOBP_CHECK(per_stage >= 1, "--layers ", options.layers, " is too small for ", named.name);
  EmulatedLayer layer;
  layer.forward = layer.backward_p1 = layer.backward_p2 = options.milliseconds * 1e-3 / options.layers;
  layer.activation_bytes = layer.stash_bytes = 1 << 10;
  layer.gradient_bytes = options.gradient_bytes;
  Subject subject;
  subject.model = emulated(std::vector<EmulatedLayer>(static_cast<size_t>(stages) * per_stage, layer));
  for (const LayerSpec& spec : subject.model.layers) {
    LayerCost& cost = subject.profile[spec.kind];
    cost.forward = cost.backward_p1 = cost.backward_p2 = layer.forward;
    cost.p2_units = 1;
  }
  subject.split.assign(stages, per_stage);
  subject.bucket_bytes = static_cast<double>(options.gradient_bytes) * std::max(1, options.buckets);
  return subject;
}

Subject real_subject(const Options& options) {
  const Config config = load_config(options.config, {});
  Subject subject;
  subject.model = build_model(config);
  const DataSplit data = open_data(config.data, config.model.input(), config.train.seed);
  std::vector<int64_t> first(std::min(config.pipeline.micro_batch_size, data.train->size()));
  std::iota(first.begin(), first.end(), 0);
  subject.fields = data.train->read(first, 0);
  subject.loss_weight = 1e-3;
  at::set_num_threads(1);
  subject.profile = measure_profile(subject.model, subject.fields);
  subject.bucket_bytes = static_cast<double>(parse_bucket(config.pipeline.bucket));
  return subject;
}

std::vector<double> simulated(const NamedSchedule& named, const Study& study, const Run& run, const Subject& subject,
                              const Options& options, int micro_batches) {
  const int stages = static_cast<int>(study.costs.size());
  std::vector<StageCost> costs = options.config.empty() ? profiled_costs(study.costs) : study.measured;
  for (int s = 0; s < stages; ++s) {
    for (size_t i = 0; i < costs[s].layers.size(); ++i) costs[s].layers[i].gradient_bytes = study.gradients[s][i];
    costs[s].optimizer = 0;
  }
  SimulationOptions simulation;
  simulation.p2_order = run.method.order;
  if (run.method.streams) simulation.streams.assign(static_cast<size_t>(stages), true);
  simulation.data_parallel.replicas = options.replicas;
  simulation.data_parallel.latency = 2 * options.latency;  // there and back
  simulation.data_parallel.bytes_per_second = options.shards ? 2 * run.bytes_per_second : run.bytes_per_second;
  simulation.data_parallel.bucket_bytes = subject.bucket_bytes;
  const Schedule schedule =
      ScheduleSource(std::string(named.name)).make(stages, options.ranks, micro_batches, run.method.policy);
  std::vector<double> exposed;
  for (const RankSimulation& rank : simulate(schedule, costs, simulation).ranks) exposed.push_back(rank.exposed);
  return exposed;
}

std::string in_milliseconds(const std::vector<double>& seconds) {
  std::string text;
  char number[32];
  for (const double one : seconds) {
    std::snprintf(number, sizeof number, "%s%.1f", text.empty() ? "" : " / ", one * 1e3);
    text += number;
  }
  return text;
}

void study_schedule(const NamedSchedule& named, const Options& options, json& rows) {
  const Subject subject = options.config.empty() ? emulated_subject(named, options) : real_subject(options);
  const int micro_batches = options.micro_batches > 0 ? options.micro_batches : 2 * options.ranks;
  Study study;
  // A link's speed is defined by the time that it needs for the sums of one rank. The unit is the time of one
  // micro-batch's W on that rank.
  double bytes = 0;
  double p2 = 0;
  for (const LayerSpec& spec : subject.model.layers) {
    p2 += subject.profile.at(spec.kind).backward_p2 / options.ranks;
    std::vector<Parameter*> parameters;
    const auto layer = spec.make();
    layer->collect_parameters(parameters);
    for (const Parameter* parameter : parameters) {
      if (parameter->trainable()) bytes += 4.0 * static_cast<double>(parameter->numel()) / options.ranks;
    }
  }
  const double sent = (options.shards ? 1.0 : 2.0) * (options.replicas - 1) / options.replicas * bytes;
  for (const Method& method : methods_of(named)) {
    study.runs.push_back({method, 0, {}});
    for (const double speed : options.speeds) study.runs.push_back({method, sent / (speed * p2), {}});
  }
  for (const bool streams : {false, true}) {
    run_worlds(make_in_process_worlds(options.replicas, options.ranks, 0), [&](World world) {
      run_replica(std::move(world), named, subject, options, micro_batches, streams, study);
    });
  }
  const size_t each = options.speeds.size() + 1;
  for (size_t link = 1; link < each; ++link) {
    const double standard = study.runs[link].median().longest();
    for (size_t m = 0; m < study.runs.size() / each; ++m) {
      const Run& run = study.runs[m * each + link];
      const Measured measured = run.median();
      const Measured free = study.runs[m * each].median();
      const std::vector<double> predicted = simulated(named, study, run, subject, options, micro_batches);
      const double longest = *std::max_element(predicted.begin(), predicted.end());
      const double speed = options.speeds[link - 1];
      std::printf("%-18s %5.2f  %-18s %9.1f %9.1f  %9.1f %9.1f  %-18s %-18s %9.2f\n", std::string(named.name).c_str(),
                  speed, run.method.name, measured.seconds * 1e3, (measured.seconds - free.seconds) * 1e3,
                  measured.longest() * 1e3, longest * 1e3, in_milliseconds(measured.exposed).c_str(),
                  in_milliseconds(predicted).c_str(), measured.longest() / standard);
      rows.push_back({{"model", options.config.empty() ? "emulated" : options.config},
                      {"schedule", named.name},
                      {"ranks", options.ranks},
                      {"replicas", options.replicas},
                      {"micro_batches", micro_batches},
                      {"link", speed},
                      {"bytes_per_second", run.bytes_per_second},
                      {"sum_seconds", speed * p2},
                      {"method", run.method.name},
                      {"step_seconds", measured.seconds},
                      {"step_seconds_free_link", free.seconds},
                      {"exposed_seconds", measured.exposed},
                      {"exposed_seconds_simulated", predicted}});
    }
  }
  std::fflush(stdout);
}

int run(const Options& options) {
  std::printf(
      "%d replicas x %d ranks, medians of %d steps.\n"
      "Exposed: the wait for gradient sums after the last W, on the rank that waits longest.\n"
      "Link: the time for the sums of a rank, in units of one micro-batch's W of a rank.\n"
      "Slower: step time minus step time on a free link.\n"
      "Last column: exposed time relative to standard backward.\n\n",
      options.replicas, options.ranks, options.steps);
  std::printf("%-18s %5s  %-18s %9s %9s  %9s %9s  %-18s %-18s %9s\n", "schedule", "link", "backward", "step ms",
              "slower", "exposed", "simulated", "by rank", "simulated", "standard");
  json rows = json::array();
  for (const std::string& name : options.schedules) study_schedule(named_schedule(name), options, rows);
  if (!options.json_file.empty()) {
    write_text(options.json_file, json{{"machine", machine_to_json()}, {"rows", rows}}.dump(1) + "\n");
  }
  return 0;
}

}  // namespace
}  // namespace twobp

int main(int argc, char** argv) {
  CLI::App app{"Compares the measured wait for gradient sums in data parallelism with the simulated one."};
  twobp::Options options;
  app.add_option("--schedules", options.schedules, "Named schedules")->delimiter(',')->capture_default_str();
  app.add_option("--links", options.speeds, "Time for the sums of a rank, in units of one micro-batch's W")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--ranks", options.ranks, "Ranks per pipeline")->capture_default_str();
  app.add_option("--replicas", options.replicas, "Replicas of the pipeline")->capture_default_str();
  app.add_option("--micro-batches", options.micro_batches, "Micro-batches per replica; 0: twice the ranks");
  app.add_option("--layers", options.layers, "Emulated layers per rank")->capture_default_str();
  app.add_option("--milliseconds", options.milliseconds, "Time of each of F, I and W on a rank (emulated)")
      ->capture_default_str();
  app.add_option("--gradient-bytes", options.gradient_bytes, "Gradient bytes per layer (emulated)")
      ->capture_default_str();
  app.add_option("--bucket-layers", options.buckets, "Layers per bucket (emulated); 0: one layer");
  app.add_flag("--shards", options.shards, "Each replica needs the sums of its share alone: half the bytes");
  app.add_option("--latency", options.latency, "Latency of a message in seconds")->capture_default_str();
  app.add_option("--steps", options.steps, "Steps of each method; the methods alternate")->capture_default_str();
  app.add_option("--config", options.config, "Run the model of this configuration instead, with its bucket size");
  app.add_option("--json", options.json_file, "File for the rows as JSON");
  CLI11_PARSE(app, argc, argv);
  try {
    return twobp::run(options);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
