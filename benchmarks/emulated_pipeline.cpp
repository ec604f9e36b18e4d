// Measures how well the real executor and transport keep up with the simulation at many ranks. The schedules run on
// layers that wait instead of computing (benchmarks/emulated.h). The table shows the measured bubble, the simulated one
// for the requested costs, and the bubble as the zero-bubble papers define it: 1 - M (F + I + W) / longest span of a
// rank (arXiv 2401.10241, section 5.3). A span runs from a rank's first op to its last.
//
//   build/release/benchmarks/emulated_pipeline --ranks 4,8 --milliseconds 10
//   build/release/benchmarks/emulated_pipeline --ranks 4,8 --schedules 1f1b,gpipe --p2 fill --streamed
#include <algorithm>
#include <cstdio>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "apps/json_report.h"
#include "benchmarks/emulated.h"
#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp {
namespace {

using nlohmann::json;

struct Options {
  std::vector<int> ranks = {4, 8, 16, 32};
  std::vector<std::string> schedules;
  std::vector<std::string> policies;  // empty: placed if the schedule places W, else off and fill
  int micro_batches_per_rank = 4;
  int micro_batches = 0;     // 0: set by the number of ranks
  int slices = 1;            // of each micro-batch
  int layers = 4;            // per stage: the number of pieces of W
  bool streamed = false;     // also with streamed gradients, whose W waits for the end of a stage's I
  double milliseconds = 10;  // of F, of I and of W of a micro-batch on a rank, over all its stages
  std::string json_file;
};

struct Bubble {
  double idle = 0;     // 1 - busy / step, mean over ranks
  double authors = 0;  // 1 - M (F + I + W) / longest span
  double seconds = 0;  // of one step
};

// The spans run from the first F to the last op. `work` is a rank's time for F, I and W in seconds.
Bubble of_simulation(const Simulation& simulation, double work) {
  double longest = 0;
  for (const RankSimulation& rank : simulation.ranks) {
    longest = std::max(longest, rank.timeline.back().end - rank.timeline.front().begin);
  }
  return {simulation.bubble_ratio(), 1 - work / longest, simulation.step_seconds};
}

Bubble of_run(const StepReport& report) {
  double longest = 0;
  double work = 0;
  for (size_t r = 0; r < report.ranks.size(); ++r) {
    const auto& events = report.events[r];
    double begin = report.end;
    double end = report.begin;
    for (const Event& event : events) {
      if (event.kind > Event::Kind::kBackwardP2) continue;
      begin = std::min(begin, event.begin);
      end = std::max(end, event.end);
    }
    longest = std::max(longest, end - begin);
    work = std::max(work, report.ranks[r].busy - report.ranks[r].optimizer);
  }
  return {report.mean_idle(), 1 - work / longest, report.seconds()};
}

// Activations and stash of the fullest rank.
int64_t most_held(const StepReport& report) {
  int64_t most = 0;
  for (const MemoryUse& use : report.rank_memory) {
    most = std::max(most, use.at_peak[static_cast<size_t>(MemoryCategory::kActivations)] +
                              use.at_peak[static_cast<size_t>(MemoryCategory::kStash)]);
  }
  return most;
}

// Layers without weights have nothing to update.
class NoUpdate : public StepUpdate {
 public:
  void apply(int, const std::vector<Parameter*>&) override {}
  std::vector<Waited> run(int) override { return {}; }
  Settled settle(int) override { return {}; }
};

json measure(const NamedSchedule& named, int ranks, P2Policy policy, bool streamed, const Options& options) {
  const int per_rank = usual_stages_per_rank(named.placement);
  const int stages = ranks * per_rank;
  const int micro_batches = options.micro_batches > 0 ? options.micro_batches : options.micro_batches_per_rank * ranks;
  EmulatedLayer layer;
  layer.forward = layer.backward_p1 = layer.backward_p2 =
      options.milliseconds * 1e-3 / per_rank / options.layers / options.slices;
  layer.activation_bytes = layer.stash_bytes = (1 << 16) / options.slices;
  const ModelSpec model = emulated(std::vector<EmulatedLayer>(static_cast<size_t>(stages) * options.layers, layer));
  Profile profile;
  for (const LayerSpec& spec : model.layers) {
    LayerCost& cost = profile[spec.kind];
    cost.forward = layer.forward;
    cost.backward_p1 = layer.backward_p1;
    cost.backward_p2 = layer.backward_p2;
    cost.p2_units = 1;
  }
  PipelineOptions pipeline_options;
  pipeline_options.stages = stages;
  pipeline_options.split.assign(stages, options.layers);
  pipeline_options.rank_of_stage = place_stages(named.placement, stages, ranks);
  const int64_t positions = kSliceBlock * options.slices;
  if (options.slices > 1) {
    pipeline_options.slices = {equal_cuts(positions, options.slices), std::vector<Profile>(options.slices, profile)};
  }
  Pipeline pipeline(model, profile, pipeline_options);
  SimulationOptions simulation_options;
  if (streamed) simulation_options.streams.assign(static_cast<size_t>(stages), true);
  pipeline.stream_gradients(simulation_options.streams);
  const StepPlan plan = pipeline.plan(named.name, micro_batches, policy, {P2Batching::kLoop, 0});

  std::vector<StageCost> costs(stages);
  for (StageCost& cost : costs) {
    cost.forward = cost.backward_p1 = cost.backward_p2 = layer.forward * options.layers;
    cost.p2_units = options.layers;
    cost.activation_bytes = static_cast<double>(layer.activation_bytes) * options.layers;
    cost.stash_bytes = static_cast<double>(layer.stash_bytes) * options.layers;
  }
  const double work = micro_batches * 3 * options.milliseconds * 1e-3;
  const Simulation simulation = simulate(plan.schedule, costs, simulation_options);
  const Bubble simulated = of_simulation(simulation, work);
  double most_held_simulated = 0;
  for (const RankSimulation& rank : simulation.ranks)
    most_held_simulated = std::max(most_held_simulated, rank.peak_bytes);

  const std::vector<Fields> batch(micro_batches, {{"input_ids", at::zeros({1, positions}, at::kLong)}});
  StepRequest step;
  step.want_events = true;
  step.update = std::make_shared<NoUpdate>();
  const StepReport measured_report = pipeline.run(plan, batch, step);
  const Bubble measured = of_run(measured_report);

  std::printf("%-18s %-8s %4d %4d  %8.3fs %8.3fs  %7.4f %7.4f %+8.4f  %7.4f %7.4f\n", std::string(named.name).c_str(),
              streamed ? "streamed" : std::string(policy_name(policy)).c_str(), ranks, micro_batches, measured.seconds,
              simulated.seconds, measured.idle, simulated.idle, measured.idle - simulated.idle, measured.authors,
              simulated.authors);
  std::fflush(stdout);
  return {{"schedule", named.name},
          {"p2", policy_name(policy)},
          {"gradients", streamed ? "streamed" : "kept"},
          {"ranks", ranks},
          {"micro_batches", micro_batches},
          {"slices", options.slices},
          {"peak_held_bytes", most_held(measured_report)},
          {"peak_held_bytes_simulated", most_held_simulated},
          {"step_seconds", measured.seconds},
          {"step_seconds_simulated", simulated.seconds},
          {"idle", measured.idle},
          {"idle_simulated", simulated.idle},
          {"bubble_of_span", measured.authors},
          {"bubble_of_span_simulated", simulated.authors}};
}

int run(const Options& options) {
  std::printf("F = I = W = %g ms per rank; idle: 1 - busy / step; of span: 1 - M (F + I + W) / longest span\n\n",
              options.milliseconds);
  std::printf("%-18s %-8s %4s %4s  %9s %9s  %7s %7s %8s  %7s %7s\n", "schedule", "p2", "N", "M", "step", "simulated",
              "idle", "simul.", "differs", "of span", "simul.");
  json rows = json::array();
  for (const int ranks : options.ranks) {
    for (const std::string& name : options.schedules.empty() ? schedule_names() : options.schedules) {
      const NamedSchedule& named = named_schedule(name);
      if (options.slices > 1 && !named.takes_slices) continue;
      std::vector<std::string> policies = options.policies;
      if (policies.empty()) {
        policies = named.places_p2 ? std::vector<std::string>{"placed"} : std::vector<std::string>{"off", "fill"};
      }
      for (const std::string& policy : policies) {
        const P2Policy asked = parse_policy(policy);
        rows.push_back(measure(named, ranks, asked, false, options));
        if (options.streamed && asked != P2Policy::kOff) rows.push_back(measure(named, ranks, asked, true, options));
      }
    }
  }
  if (!options.json_file.empty()) {
    write_text(options.json_file, json{{"machine", machine_to_json()}, {"rows", rows}}.dump(1) + "\n");
  }
  return 0;
}

}  // namespace
}  // namespace twobp

int main(int argc, char** argv) {
  CLI::App app{"Compares measured with simulated bubbles, on layers that wait instead of computing."};
  twobp::Options options;
  app.add_option("--ranks", options.ranks, "Numbers of ranks")->delimiter(',')->capture_default_str();
  app.add_option("--schedules", options.schedules, "Named schedules (default: all)")->delimiter(',');
  app.add_option("--p2", options.policies,
                 "p2 policies (default: placed where the schedule places W, else off and fill)")
      ->delimiter(',');
  app.add_option("--micro-batches-per-rank", options.micro_batches_per_rank, "Micro-batches per rank, M / N")
      ->capture_default_str();
  app.add_option("--micro-batches", options.micro_batches, "Number of micro-batches M, for every number of ranks");
  app.add_option("--slices", options.slices, "Equal slices of each micro-batch")->capture_default_str();
  app.add_option("--layers", options.layers, "Layers per stage; W runs in as many pieces")->capture_default_str();
  app.add_flag("--streamed", options.streamed, "Also with streamed gradients, where p2 is not off");
  app.add_option("--milliseconds", options.milliseconds, "Time of each of F, I and W on a rank")->capture_default_str();
  app.add_option("--json", options.json_file, "File for the rows as JSON");
  CLI11_PARSE(app, argc, argv);
  try {
    return twobp::run(options);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
