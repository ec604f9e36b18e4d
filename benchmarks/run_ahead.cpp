// Measures the gain of pipeline.run_ahead at many ranks. It compares step time and idle time of two trainers, which
// alternate. In the first one, a rank starts the next step as soon as it has finished its part of the current one. In
// the other one, the ranks wait for each other between steps. Layers wait instead of computing (benchmarks/emulated.h).
// Each figure stands next to the simulated one for the requested costs. With --clip, gradients are clipped to a norm
// that is never reached, so ranks that run ahead assume that no clipping is needed.
//
//   build/release/benchmarks/run_ahead --ranks 8 --schedules zb-h2,zb-v,1f1b
#include <algorithm>
#include <cstdio>
#include <memory>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "apps/json_report.h"
#include "benchmarks/emulated.h"
#include "twobp/core/measure.h"
#include "twobp/core/text.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/profile/profile.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/simulate/for_training.h"
#include "twobp/train/trainer.h"
#include "twobp/train/variant.h"

namespace twobp {
namespace {

using nlohmann::json;

constexpr int kWarmUp = 2;  // steps

struct Options {
  std::vector<int> ranks = {4, 8, 16, 32};
  std::vector<std::string> schedules = {"zb-h2", "zb-v", "1f1b"};
  int micro_batches_per_rank = 2;
  double milliseconds = 4;  // of F, of I and of W on a rank, over all its stages
  int steps = 8;            // per round
  int rounds = 5;
  bool clip = false;
  std::string json_file;
};

class Numbers : public Dataset {
 public:
  int64_t size() const override { return 1 << 20; }
  Fields read(const std::vector<int64_t>& indices, int64_t /*epoch*/) const override {
    return {{"input", at::zeros({static_cast<int64_t>(indices.size()), 1})}};
  }
};

struct Case {
  std::string schedule;
  int ranks = 0;
  int stages = 0;
  int micro_batches = 0;
  EmulatedLayer layer;  // the only layer of each stage
};

Case make_case(const std::string& schedule, int ranks, const Options& options) {
  const int per_rank = usual_stages_per_rank(named_schedule(schedule).placement);
  Case it{schedule, ranks, ranks * per_rank, options.micro_batches_per_rank * ranks, {}};
  it.layer.forward = it.layer.backward_p1 = it.layer.backward_p2 = options.milliseconds * 1e-3 / per_rank;
  it.layer.activation_bytes = it.layer.stash_bytes = it.layer.gradient_bytes = 1 << 10;
  return it;
}

std::unique_ptr<Trainer> make_trainer(const Case& it, bool ahead, const Options& options) {
  Config config;
  config.pipeline.ranks = it.ranks;
  config.pipeline.stages = it.stages;
  config.pipeline.schedule = it.schedule;
  config.pipeline.micro_batches = it.micro_batches;
  config.pipeline.micro_batch_size = 1;
  config.pipeline.p2 = policy_name(policies_of(it.schedule).back());
  config.pipeline.memory_cap = "0";
  config.pipeline.split.assign(it.stages, 1);
  config.pipeline.run_ahead = ahead ? "on" : "off";
  config.train.clip_norm = options.clip ? 1e9 : 0;
  config.optimizer.schedule = "constant";
  return std::make_unique<Trainer>(config, emulated(std::vector<EmulatedLayer>(it.stages, it.layer)),
                                   DataSplit{std::make_shared<Numbers>(), nullptr});
}

struct Round {
  double seconds = 0;  // of one step
  double idle = 0;     // mean over steps and ranks
};

// Times steps in the middle of a run. When the last of them ends, the next step is already in progress.
Round run_round(Trainer& trainer, int steps) {
  trainer.run_ahead_until(trainer.steps_done() + kWarmUp + steps + 1);
  double begin = 0;
  for (int i = 0; i < kWarmUp; ++i) begin = trainer.step().report.end;
  Round round;
  for (int i = 0; i < steps; ++i) {
    const StepReport report = trainer.step().report;
    round.seconds = (report.end - begin) / steps;
    round.idle += report.mean_idle() / steps;
  }
  trainer.step();
  return round;
}

StepPeriods simulated(const Case& it, const Schedule& schedule, const Options& options) {
  StageCost cost;
  cost.forward = it.layer.forward;
  cost.backward_p1 = it.layer.backward_p1;
  cost.backward_p2 = it.layer.backward_p2;
  return step_periods(schedule, std::vector<StageCost>(it.stages, cost), in_process_simulation(),
                      options.clip ? NormNeed::kAfterForwards : NormNeed::kNone);
}

json measure(const Case& it, const Options& options) {
  const std::unique_ptr<Trainer> waits = make_trainer(it, false, options);
  const std::unique_ptr<Trainer> ahead = make_trainer(it, true, options);
  std::vector<Round> waited;
  std::vector<Round> went_ahead;
  for (int round = 0; round < options.rounds; ++round) {
    const bool ahead_first = round % 2 == 1;
    if (ahead_first) went_ahead.push_back(run_round(*ahead, options.steps));
    waited.push_back(run_round(*waits, options.steps));
    if (!ahead_first) went_ahead.push_back(run_round(*ahead, options.steps));
  }
  const auto all = [](const std::vector<Round>& rounds, double Round::*what) {
    std::vector<double> values;
    for (const Round& round : rounds) values.push_back(round.*what);
    return values;
  };
  const Schedule schedule =
      ahead->pipeline()
          .plan(it.schedule, it.micro_batches, policies_of(it.schedule).back(), {P2Batching::kLoop, 0})
          .schedule;
  const StepPeriods periods = simulated(it, schedule, options);
  json row = {{"schedule", it.schedule},
              {"p2", policy_name(policies_of(it.schedule).back())},
              {"ranks", it.ranks},
              {"micro_batches", it.micro_batches},
              {"clip", options.clip},
              {"seconds_barrier_all", all(waited, &Round::seconds)},
              {"seconds_ahead_all", all(went_ahead, &Round::seconds)},
              {"idle_barrier_all", all(waited, &Round::idle)},
              {"idle_ahead_all", all(went_ahead, &Round::idle)},
              {"seconds_barrier_simulated", periods.barrier},
              {"seconds_ahead_simulated", periods.overlap},
              {"idle_ahead_simulated", periods.idle},
              {"gain_simulated", periods.gain()},
              {"gain_of_profile", ahead->run_ahead().gain}};
  const double seconds = median(all(waited, &Round::seconds));
  const double seconds_ahead = median(all(went_ahead, &Round::seconds));
  std::printf("%-8s %4d %4d  %8.4fs %8.4fs  %6.3fx %6.3fx  %7.4f %7.4f %7.4f\n", it.schedule.c_str(), it.ranks,
              it.micro_batches, seconds, seconds_ahead, seconds / seconds_ahead, periods.gain(),
              median(all(waited, &Round::idle)), median(all(went_ahead, &Round::idle)), periods.idle);
  std::fflush(stdout);
  return row;
}

int run(const Options& options) {
  std::printf("F = I = W = %g ms per rank%s; %d rounds of %d steps, medians\n\n", options.milliseconds,
              options.clip ? ", with clipping" : "", options.rounds, options.steps);
  std::printf("%-8s %4s %4s  %9s %9s  %7s %7s  %7s %7s %7s\n", "schedule", "N", "M", "barrier", "ahead", "faster",
              "simul.", "idle", "ahead", "simul.");
  json rows = json::array();
  for (const int ranks : options.ranks) {
    for (const std::string& schedule : options.schedules)
      rows.push_back(measure(make_case(schedule, ranks, options), options));
  }
  if (!options.json_file.empty())
    write_text(options.json_file, json{{"machine", machine_to_json()}, {"rows", rows}}.dump(1) + "\n");
  return 0;
}

}  // namespace
}  // namespace twobp

int main(int argc, char** argv) {
  CLI::App app{"Compares steps without a barrier to steps with one, on layers that wait instead of computing."};
  twobp::Options options;
  app.add_option("--ranks", options.ranks, "Numbers of ranks")->delimiter(',')->capture_default_str();
  app.add_option("--schedules", options.schedules, "Named schedules")->delimiter(',')->capture_default_str();
  app.add_option("--micro-batches-per-rank", options.micro_batches_per_rank, "Micro-batches per rank, M / N")
      ->capture_default_str();
  app.add_option("--milliseconds", options.milliseconds, "Time of each of F, I and W on a rank")->capture_default_str();
  app.add_option("--steps", options.steps, "Steps per round")->capture_default_str();
  app.add_option("--rounds", options.rounds, "Rounds with and without a barrier, which alternate")
      ->capture_default_str();
  app.add_flag("--clip", options.clip, "Clip gradients, so that steps depend on the norm of all gradients");
  app.add_option("--json", options.json_file, "File for the rows as JSON");
  CLI11_PARSE(app, argc, argv);
  try {
    return twobp::run(options);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
