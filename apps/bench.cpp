#include "apps/bench.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <numeric>
#include <set>
#include <utility>

#include "apps/json_report.h"
#include "twobp/core/check.h"
#include "twobp/core/median.h"
#include "twobp/core/text.h"
#include "twobp/pipeline/simulated_costs.h"
#include "twobp/schedule/check/in_process.h"
#include "twobp/schedule/simulate/simulate.h"
#include "twobp/train/auto_variant.h"
#include "twobp/train/model/architecture.h"
#include "twobp/train/model/build_model.h"
#include "twobp/train/run_world.h"
#include "twobp/train/trainer.h"

namespace twobp {
namespace {

using nlohmann::json;

struct BenchOptions {
  std::string config;
  std::vector<std::string> overrides;
  std::vector<std::string> schedules = {"1f1b"};
  std::vector<std::string> policies = {"off", "end", "fill"};
  std::vector<std::string> batchings;
  std::vector<std::string> caps;
  std::vector<std::string> precisions;
  std::vector<std::string> recomputes;
  std::vector<int> micro_batches;
  int repeat = 5;
  int steps = 2;
  int warmup = 1;
  std::string json_file;
};

// Name and policies of one of --schedules: `zb-v`, under all of --p2, or `zb-v@fill`, under that one alone.
std::pair<std::string, std::vector<std::string>> asked_schedule(const std::string& text,
                                                                const std::vector<std::string>& policies) {
  const size_t at = text.rfind('@');
  if (at == std::string::npos || ScheduleSource::is_file(text)) return {text, policies};
  return {text.substr(0, at), {text.substr(at + 1)}};
}

// One row of the table: a way to run a step, and what was measured of it.
struct Row {
  Trainer* trainer = nullptr;
  std::string schedule;  // as asked for
  Variant variant;
  std::string cap;
  Batch batch;
  std::vector<double> seconds;
  std::vector<std::vector<double>> idle;       // [rank][sample]
  std::vector<std::vector<double>> predicted;  // [rank][sample]
  std::vector<double> predicted_seconds;
  std::vector<double> products;    // by sample: share of the ranks' busy time
  std::vector<double> p2_seconds;  // by sample: of all stages
  std::vector<RankTimes> last;
  std::vector<StageTimes> stages;
  std::vector<int64_t> peaks;  // by rank
  std::vector<int64_t> held;   // of these, activations and stash
};

std::string recompute_of(const Row& row) {
  const auto& rules = row.trainer->config().pipeline.recompute;
  return rules.empty() ? "none" : join(rules);
}

// What the simulation gives for the F, I, W and optimizer times of this very step.
Simulation predict(Pipeline& pipeline, const Plan& plan, const StepReport& report) {
  const auto costs = measured_costs(pipeline.stage_costs(), pipeline.rank_of_stage(), report);
  return simulate(plan.schedule, costs, in_process_simulation(pipeline.caps(plan)));
}

// The configuration for a schedule, on the ranks of the one that was given: a split by hand is for its stages
// alone, and a schedule in a file has its own number of micro-batches.
Config config_for(const Config& config, const std::string& schedule) {
  if (schedule == config.pipeline.schedule) return config;
  const PipelineShape given = pipeline_shape(config.pipeline);
  Config of_rows = config;
  of_rows.pipeline.schedule = schedule;
  of_rows.pipeline.ranks = given.ranks;
  of_rows.pipeline.stages = 0;
  if (ScheduleSource::is_file(schedule)) of_rows.pipeline.micro_batches = 0;
  if (pipeline_shape(of_rows.pipeline).rank_of_stage != given.rank_of_stage) of_rows.pipeline.split.clear();
  return of_rows;
}

std::vector<int> placement_of(const Config& config, const std::string& schedule) {
  return pipeline_shape(config_for(config, schedule).pipeline).rank_of_stage;
}

// Rows of the schedules whose stages lie, with what was given, as the trainer's do.
std::vector<Row> make_rows(const BenchOptions& options, const Config& given, Trainer& trainer) {
  std::vector<Row> rows;
  const Config& config = trainer.config();
  auto or_configured = [](const auto& asked, const auto& configured) {
    return asked.empty() ? std::decay_t<decltype(asked)>{configured} : asked;
  };
  const auto batchings = or_configured(options.batchings, config.pipeline.p2_batching);
  const auto caps = or_configured(options.caps, config.pipeline.memory_cap);
  const auto counts = or_configured(options.micro_batches, trainer.micro_batches());
  for (const int count : counts) {
    TWOBP_CHECK(count >= 1, "--micro-batches must be at least 1, got ", count);
    std::vector<int64_t> indices(count * config.pipeline.micro_batch_size);
    for (size_t i = 0; i < indices.size(); ++i)
      indices[i] = static_cast<int64_t>(i) % trainer.data().train->size();
    const Batch batch = read_batch(*trainer.data().train, indices, 0, config.pipeline.micro_batch_size);
    for (const auto& asked : options.schedules) {
      const auto [schedule, policies] = asked_schedule(asked, options.policies);
      if (placement_of(given, schedule) != trainer.pipeline().rank_of_stage()) continue;
      const bool searched = schedule == kAutoSchedule;  // with a policy of its own
      TWOBP_CHECK(!searched || asked == schedule, "--schedules ", asked, ": '", schedule,
                  "' has a policy of its own; leave '@' and what follows out");
      const ScheduleSource source(schedule);
      for (const auto& policy : searched ? std::vector<std::string>{"fill"} : policies) {
        if (!searched && parse_policy(policy) == P2Policy::kPlaced &&
            source.default_policy() != P2Policy::kPlaced)
          continue;
        for (const auto& batching : batchings) {
          for (const auto& cap : caps) {
            Row row;
            row.trainer = &trainer;
            row.schedule = schedule;
            row.variant = {source, parse_policy(policy), parse_batching(batching), parse_memory_cap(cap)};
            if (searched) row.variant = auto_variant(trainer.pipeline(), count, row.variant);
            row.cap = cap;
            row.batch = batch;
            rows.push_back(std::move(row));
          }
        }
      }
    }
  }
  return rows;
}

ProductTime products_of(const std::vector<RankTimes>& ranks) {
  ProductTime all;
  for (const RankTimes& times : ranks) all += times.products;
  return all;
}

void measure(Row& row, int untimed_steps, const BenchOptions& options) {
  Trainer& trainer = *row.trainer;
  Pipeline& pipeline = trainer.pipeline();
  for (int i = 0; i < untimed_steps; ++i) trainer.step(row.batch, row.variant);
  pipeline.meter().reset_peaks();
  const Plan plan = make_plan(pipeline, row.variant, static_cast<int>(row.batch.micro_batches.size()));
  row.idle.resize(pipeline.ranks());
  row.predicted.resize(pipeline.ranks());
  row.peaks.resize(pipeline.ranks());
  row.held.resize(pipeline.ranks());
  for (int i = 0; i < options.steps; ++i) {
    const StepReport report = trainer.step(row.batch, row.variant).report;
    row.seconds.push_back(report.seconds());
    const Simulation predicted = predict(pipeline, plan, report);
    row.predicted_seconds.push_back(predicted.step_seconds);
    for (int r = 0; r < pipeline.ranks(); ++r) {
      row.idle[r].push_back(report.idle_fraction(r));
      row.predicted[r].push_back(predicted.idle_fraction(r));
    }
    double busy = 0;
    for (const RankTimes& times : report.ranks) busy += times.busy;
    row.products.push_back(products_of(report.ranks).seconds / busy);
    for (int r = 0; r < pipeline.ranks(); ++r) {
      const MemoryUse& use = report.rank_memory[r];
      if (use.peak <= row.peaks[r]) continue;
      row.peaks[r] = use.peak;
      row.held[r] = use.at_peak[static_cast<size_t>(MemoryCategory::kActivations)] +
                    use.at_peak[static_cast<size_t>(MemoryCategory::kStash)];
    }
    row.last = report.ranks;
    row.stages = report.stages;
    row.p2_seconds.push_back(0);
    for (const StageTimes& times : report.stages) row.p2_seconds.back() += times.backward_p2;
  }
}

std::vector<double> medians(const std::vector<std::vector<double>>& samples) {
  std::vector<double> out;
  for (const auto& sample : samples) out.push_back(median(sample));
  return out;
}

double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

json row_to_json(const Row& row) {
  const Pipeline& pipeline = row.trainer->pipeline();
  json idle_seconds = json::array();
  for (const RankTimes& times : row.last) idle_seconds.push_back(idle_to_json(times));
  json optimizer_seconds = json::array();
  for (const RankTimes& times : row.last) optimizer_seconds.push_back(times.optimizer);
  const ProductTime products = products_of(row.last);  // of the last step
  json allocations = json::array();
  for (const RankTimes& times : row.last) allocations.push_back(times.allocations);
  json stage_seconds = json::array();
  double p2_operations = 0;
  for (const StageTimes& times : row.stages) {
    const double n = std::max(1, times.micro_batches);
    stage_seconds.push_back(
        {{"F", times.forward / n}, {"I", times.backward_p1 / n}, {"W", times.backward_p2 / n}});
    p2_operations += times.p2_products.operations;
  }
  const double seconds = median(row.seconds);
  const double p2_seconds = median(row.p2_seconds);
  return {{"schedule", row.schedule},
          {"schedule_name", row.variant.schedule.name()},
          {"p2", policy_name(row.variant.policy)},
          {"p2_batching", batching_name(row.variant.batching)},
          {"memory_cap", row.cap},
          {"precision", row.trainer->config().train.precision},
          {"recompute", recompute_of(row)},
          {"stages", pipeline.stages()},
          {"split", pipeline.split()},
          {"micro_batches", row.batch.micro_batches.size()},
          {"step_seconds", seconds},
          {"step_seconds_all", row.seconds},
          {"predicted_seconds_all", row.predicted_seconds},
          {"tokens_per_second", static_cast<double>(row.batch.tokens) / seconds},
          {"idle_fraction", medians(row.idle)},
          {"idle_predicted", medians(row.predicted)},
          {"idle_seconds", idle_seconds},
          {"stage_seconds", stage_seconds},
          {"optimizer_seconds", optimizer_seconds},
          {"product_share", median(row.products)},
          {"product_gflops", products.seconds > 0 ? products.operations / products.seconds / 1e9 : 0},
          {"p2_seconds_all", row.p2_seconds},
          {"p2_gflops", p2_seconds > 0 ? p2_operations / p2_seconds / 1e9 : 0},
          {"allocations", allocations},
          {"peak_bytes", row.peaks},
          {"peak_held_bytes", row.held}};
}

void print_table(const std::vector<Row>& rows) {
  const ModelInput input = architecture(rows.front().trainer->config().model.type).input;
  const std::string speed = concat(item_name(input), "/s");
  // A column where it tells rows apart.
  const bool recomputes = std::any_of(rows.begin(), rows.end(), [](const Row& row) {
    return !row.trainer->config().pipeline.recompute.empty();
  });
  const auto print_recompute = [&](const std::string& text) {
    if (recomputes) std::printf("%-12s ", text.c_str());
  };
  print_recompute("recompute");
  std::printf("%-9s %-16s %-9s %-11s %-6s %3s  %9s %17s %10s %7s %7s %9s %8s  %s\n", "precision", "schedule",
              "p2", "batching", "cap", "M", "step", "(min - max)", speed.c_str(), "speed", "idle",
              "predicted", "products", "peak memory by rank");
  for (const Row& row : rows) {
    // Against the first row of the same M, sample by sample: they were taken in turn.
    const Row* base = &row;
    for (const Row& other : rows) {
      if (other.batch.micro_batches.size() == row.batch.micro_batches.size()) {
        base = &other;
        break;
      }
    }
    std::vector<double> ratios;
    for (size_t i = 0; i < row.seconds.size(); ++i) ratios.push_back(base->seconds[i] / row.seconds[i]);
    std::vector<std::string> peaks;
    for (const int64_t peak : row.peaks) peaks.push_back(format_bytes(static_cast<double>(peak)));
    const auto [fastest, slowest] = std::minmax_element(row.seconds.begin(), row.seconds.end());
    print_recompute(recompute_of(row));
    std::printf(
        "%-9s %-16s %-9s %-11s %-6s %3zu  %8.4fs (%6.4f - %6.4f) %10.0f %6.3fx %7.3f %9.3f %8.3f  %s\n",
        row.trainer->config().train.precision.c_str(), row.schedule.c_str(),
        std::string(policy_name(row.variant.policy)).c_str(),
        std::string(batching_name(row.variant.batching)).c_str(), row.cap.c_str(),
        row.batch.micro_batches.size(), median(row.seconds), *fastest, *slowest,
        static_cast<double>(row.batch.tokens) / median(row.seconds), median(ratios), mean(medians(row.idle)),
        mean(medians(row.predicted)), median(row.products), join(peaks, " | ").c_str());
  }
  for (const Row& row : rows) {
    if (row.schedule != kAutoSchedule) continue;
    std::printf("M %zu, cap %s: %s\n", row.batch.micro_batches.size(), row.cap.c_str(),
                row.variant.schedule.name().c_str());
  }
}

int bench(const BenchOptions& options) {
  check_alone("bench", find_launcher());
  const Config config = load_config(options.config, options.overrides);
  std::vector<std::unique_ptr<Trainer>> trainers;
  std::vector<Row> rows;
  // Each precision with each recomputation.
  std::vector<Config> configs;
  for (const std::string& precision :
       options.precisions.empty() ? std::vector<std::string>{config.train.precision} : options.precisions) {
    configs.push_back(config);
    configs.back().train.precision = precision;
    for (size_t i = 0; i < options.recomputes.size(); ++i) {
      if (i > 0) configs.push_back(configs.back());
      configs.back().pipeline.recompute = {options.recomputes[i]};
    }
  }
  for (const Config& one : configs) {
    std::set<std::vector<int>> placed;  // a pipeline for each placement of stages
    for (const std::string& asked : options.schedules) {
      const std::string schedule = asked_schedule(asked, {}).first;
      if (!placed.insert(placement_of(one, schedule)).second) continue;
      const Config of_rows = config_for(one, schedule);
      check_config(of_rows);
      trainers.push_back(std::make_unique<Trainer>(of_rows));
      for (Row& row : make_rows(options, one, *trainers.back())) rows.push_back(std::move(row));
    }
  }
  TWOBP_CHECK(!rows.empty() && options.repeat >= 1 && options.steps >= 1,
              "nothing to measure: give at least one "
              "schedule, policy, repeat and step");
  // Interleaved, and in reverse order every other time, so that a drift of the machine hits all rows alike.
  const Row* previous = nullptr;
  for (int repeat = 0; repeat < options.repeat; ++repeat) {
    for (size_t i = 0; i < rows.size(); ++i) {
      Row& row = rows[repeat % 2 == 0 ? i : rows.size() - 1 - i];
      // After another row of the same trainer: its slabs, of another size, must be gone before peaks are
      // read.
      const auto has_slabs = [](const Row& one) { return one.variant.batching == P2Batching::kConcat; };
      const bool other = previous != nullptr && previous != &row && previous->trainer == row.trainer &&
                         (has_slabs(*previous) || has_slabs(row));
      const int untimed = row.trainer->config().pipeline.graphs ? 2 : other ? 1 : 0;  // the second is a graph
      measure(row, std::max(repeat == 0 ? options.warmup : 0, untimed), options);
      previous = &row;
    }
  }
  print_table(rows);
  if (!options.json_file.empty()) {
    json out = {{"machine", machine_to_json()},
                {"config", json::parse(config_to_json(config))},
                {"rows", json::array()}};
    for (const Row& row : rows) out["rows"].push_back(row_to_json(row));
    write_text(options.json_file, out.dump(1) + "\n");
  }
  return 0;
}

}  // namespace

void add_bench_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* command =
      app.add_subcommand("bench", "Time schedules and p2 policies against each other, interleaved");
  command->add_option("config", options->config, "JSON file; without it, the defaults and --set");
  command
      ->add_option("--set", options->overrides, "Override a key: section.key=value (see twobp train --help)")
      ->take_all();
  command
      ->add_option(
          "--schedules", options->schedules,
          "naive, gpipe, 1f1b, ..., a .csv file, or auto: searched for, with a p2 policy of its own; "
          "NAME@POLICY: with that p2 policy alone")
      ->delimiter(',')
      ->capture_default_str();
  command
      ->add_option("--p2", options->policies,
                   "off, end, cooldown, fill, placed (left out where a schedule places no W)")
      ->delimiter(',')
      ->capture_default_str();
  command
      ->add_option("--p2-batching", options->batchings, "loop, concat, concat_copy (default: as configured)")
      ->delimiter(',');
  command
      ->add_option("--memory-cap", options->caps, "auto, as in 1.05x, 0, or bytes (default: as configured)")
      ->delimiter(',');
  command->add_option("--precision", options->precisions, "fp32, bf16, fp16 (default: as configured)")
      ->delimiter(',');
  command
      ->add_option("--recompute", options->recomputes,
                   "none, activations, derivatives, both: what layers compute again instead of keeping, each "
                   "for itself (default: as configured)")
      ->delimiter(',');
  command
      ->add_option("--micro-batches", options->micro_batches,
                   "Numbers of micro-batches (default: as configured)")
      ->delimiter(',');
  command->add_option("--repeat", options->repeat, "Rounds over all rows")->capture_default_str();
  command->add_option("--steps", options->steps, "Timed steps per row and round")->capture_default_str();
  command->add_option("--warmup", options->warmup, "Untimed steps of each row in the first round")
      ->capture_default_str();
  command->add_option("--json", options->json_file, "File for the rows as JSON");
  command->footer(
      "Columns: speed is the step time of the first row of the same M over this row's, the median over "
      "samples "
      "that were taken\nin turn; idle is 1 - busy / step, the mean over ranks; predicted is what the "
      "simulation "
      "gives for the same from the row's own\ntimes of F, I, W and optimizer; products is the part of busy "
      "that "
      "matrix products and convolutions take.");
  command->callback([options, &exit_code] { exit_code = bench(*options); });
}

}  // namespace twobp
