// `twobp bench`: compares the times of schedules and p2 policies, interleaved, on one model in one process.
#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <utility>

#include <CLI/CLI.hpp>

#include "apps/bench_report.h"
#include "apps/commands.h"
#include "apps/json_report.h"
#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/data/balance.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/pipeline_shape.h"
#include "twobp/pipeline/profile/profile.h"
#include "twobp/pipeline/stage.h"
#include "twobp/schedule/simulate/for_training.h"
#include "twobp/schedule/simulate/simulate.h"
#include "twobp/train/build_model.h"
#include "twobp/train/trainer.h"
#include "twobp/train/variant.h"
#include "twobp/transport/start.h"

namespace twobp {
namespace {

using nlohmann::json;

struct BenchOptions {
  std::string config;
  std::vector<std::string> overrides;
  std::vector<std::string> schedules;  // empty: as configured
  std::vector<std::string> ways;
  std::vector<std::string> policies;  // empty: kPolicies
  std::vector<std::string> batchings;
  std::vector<std::string> caps;
  std::vector<std::string> precisions;
  std::vector<std::string> recomputes;
  std::vector<int> micro_batches;
  int repeat = 5;
  int steps = 2;
  int warmup = 1;
  std::string json_file;
  std::string kernels_folder;
};

const std::vector<std::string> kPolicies = {"off", "end", "fill"};

// Simulates the step with its measured F, I, W and optimizer times.
Simulation predict(const BenchRow& row, const StepPlan& plan, const StepReport& report) {
  const Pipeline& pipeline = row.trainer->pipeline();
  const auto costs = measured_costs(pipeline.layer_costs(), pipeline.rank_of_stage(), report, row.batch_costs);
  return simulate(plan.schedule, costs, simulation_of(plan));
}

// Returns the configuration for a schedule, on the ranks of the given one. A split by hand only fits its own
// stages, and a schedule in a file has its own number of micro-batches.
Config config_for(const Config& config, const std::string& schedule) {
  if (schedule == config.pipeline.schedule) return config;
  const PipelineShape given = pipeline_shape(config.pipeline);
  Config of_rows = config;
  of_rows.pipeline.schedule = schedule;
  of_rows.pipeline.p2 = PipelineConfig().p2;  // rows have their own
  of_rows.pipeline.ranks = given.ranks;
  of_rows.pipeline.stages = 0;
  if (ScheduleSource::is_file(schedule)) of_rows.pipeline.micro_batches = 0;
  if (pipeline_shape(of_rows.pipeline).rank_of_stage != given.rank_of_stage) of_rows.pipeline.split.clear();
  return of_rows;
}

std::vector<int> placement_of(const Config& config, const std::string& schedule) {
  return pipeline_shape(config_for(config, schedule).pipeline).rank_of_stage;
}

// The batch that training would step on first, in that order. If the data has too few samples, they repeat.
void set_first_batch(BenchRow& row, int micro_batches) {
  const Config& config = row.trainer->config();
  const Dataset& data = *row.trainer->data().train;
  const int64_t size = config.pipeline.micro_batch_size;
  const auto epoch = epoch_order(data.size(), config.data.shuffle, config.train.seed, 0);
  std::vector<int64_t> samples(static_cast<size_t>(micro_batches * size));
  for (size_t begin = 0; row.batch.targets == 0 && begin < epoch.size(); begin += samples.size()) {
    for (size_t i = 0; i < samples.size(); ++i) samples[i] = epoch[(begin + i) % epoch.size()];
    samples = balanced_samples(data, samples, /*replicas=*/1, micro_batches, size);
    row.batch = read_batch(data, samples, 0, size);
  }
  if (const double mean = mean_cost(data); mean != 0) row.batch_costs = batch_costs(data, samples, size, mean);
}

// Makes rows of the schedules that place their stages as the trainer does, under the given configuration.
std::vector<BenchRow> make_rows(const BenchOptions& options, const Config& given, Trainer& trainer) {
  std::vector<BenchRow> rows;
  const Config& config = trainer.config();
  auto or_configured = [](const auto& asked, const auto& configured) {
    return asked.empty() ? std::decay_t<decltype(asked)>{configured} : asked;
  };
  const auto batchings = or_configured(options.batchings, config.pipeline.p2_batching);
  const auto caps = or_configured(options.caps, config.pipeline.memory_cap);
  const auto counts = or_configured(options.micro_batches, trainer.micro_batches());
  for (const int count : counts) {
    BenchRow with_batch;
    with_batch.trainer = &trainer;
    set_first_batch(with_batch, count);
    for (const auto& asked : options.schedules) {
      const auto [source, own] = AskedSchedule(asked);
      const std::string& schedule = source.name();
      const std::vector<int>& placed = trainer.pipeline().rank_of_stage();
      if (!std::ranges::equal(placement_of(given, schedule),
                              std::span(placed).subspan(static_cast<size_t>(trainer.pipeline().frozen_stages()))))
        continue;
      const bool searched = schedule == kAutoSchedule;  // it has its own policy
      TWOBP_CHECK(!searched || !own, "--schedules ", asked, ": '", schedule,
                  "' has its own p2 policy: leave out '@' and the policy");
      std::vector<P2Policy> policies;
      if (searched || own) {
        policies = {own.value_or(P2Policy::kFill)};
      } else {
        for (const std::string& name : options.policies.empty() ? kPolicies : options.policies)
          policies.push_back(parse_policy(name));
      }
      for (const P2Policy policy : policies) {
        if (!searched && policy == P2Policy::kPlaced && !source.places_p2()) continue;
        for (const auto& batching : batchings) {
          for (const auto& cap : caps) {
            BenchRow row = with_batch;
            row.schedule = schedule;
            row.variant = {source, policy, parse_batching(batching), parse_memory_cap(cap)};
            if (searched) row.variant = auto_variant(trainer.pipeline(), count, row.variant, row.batch_costs);
            row.cap = cap;
            rows.push_back(std::move(row));
          }
        }
      }
    }
  }
  return rows;
}

// Returns the sum over all ranks.
ProductTime products_of(const StepReport& report) {
  ProductTime all;
  for (const RankTimes& times : report.ranks) all += times.products;
  return all;
}

// If steps are launched as graphs, the second of two equal steps is recorded.
int steps_until_graph(const BenchRow& row) {
  return row.trainer->config().pipeline.graphs ? 2 : 0;
}

void measure(BenchRow& row, int untimed_steps, const BenchOptions& options) {
  Trainer& trainer = *row.trainer;
  Pipeline& pipeline = trainer.pipeline();
  const auto step = [&] { return trainer.step(row.batch, row.variant, std::nullopt, row.batch.micro_batches); };
  for (int i = 0; i < untimed_steps; ++i) step();
  pipeline.meter().reset_peaks();
  const StepPlan plan = make_plan(pipeline, row.variant, static_cast<int>(row.batch.micro_batches.size()));
  row.idle.resize(pipeline.ranks());
  row.predicted.resize(pipeline.ranks());
  row.peaks.resize(pipeline.ranks());
  row.held.resize(pipeline.ranks());
  row.gradients.resize(pipeline.ranks());
  for (int i = 0; i < options.steps; ++i) {
    const StepReport report = step().report;
    row.seconds.push_back(report.seconds());
    std::optional<Simulation> predicted;
    if (report.timed()) predicted = predict(row, plan, report);
    row.predicted_seconds.push_back(predicted ? predicted->step_seconds : kUnknown);
    for (int r = 0; r < pipeline.ranks(); ++r) {
      row.idle[r].push_back(report.idle_fraction(r));
      row.predicted[r].push_back(predicted ? predicted->idle_fraction(r) : kUnknown);
    }
    double busy = 0;
    for (const RankTimes& times : report.ranks) busy += times.busy;
    row.last_products = products_of(report);
    row.products.push_back(row.last_products.seconds > 0 ? row.last_products.seconds / busy : kUnknown);
    for (int r = 0; r < pipeline.ranks(); ++r) {
      const MemoryUse& use = report.rank_memory[r];
      if (use.peak <= row.peaks[r]) continue;
      row.peaks[r] = use.peak;
      row.held[r] = use.at_peak[static_cast<size_t>(MemoryCategory::kActivations)] +
                    use.at_peak[static_cast<size_t>(MemoryCategory::kStash)];
      row.gradients[r] = use.at_peak[static_cast<size_t>(MemoryCategory::kGradients)];
    }
    row.last = report.ranks;
    row.stages = report.stages;
    row.p2_seconds.push_back(0);
    for (const StageTimes& times : report.stages) row.p2_seconds.back() += times.backward_p2;
  }
}

// Traces one more step of each row, after equal steps have run.
void trace_kernels_of(const std::vector<BenchRow>& rows, const std::string& folder) {
  for (size_t i = 0; i < rows.size(); ++i) {
    const BenchRow& row = rows[i];
    const auto step = [&] { row.trainer->step(row.batch, row.variant); };
    for (int untimed = std::max(1, steps_until_graph(row)); untimed > 0; --untimed) step();
    trace_kernels(concat(folder, "/", i, ".json"), row.trainer->config().pipeline.device != "cpu", step);
  }
}

// Makes a trainer for a way, as its settings say.
void add_way(const std::string& way, const BenchOptions& options, std::vector<std::string> overrides,
             std::vector<std::unique_ptr<Trainer>>& trainers, std::vector<BenchRow>& rows) {
  for (const std::string& setting : split(way, ' ')) {
    if (!setting.empty()) overrides.push_back(setting);
  }
  const Config config = load_config(options.config, overrides);
  BenchOptions own = options;
  own.schedules = {config.pipeline.schedule};
  trainers.push_back(std::make_unique<Trainer>(config));
  own.policies = {std::string(policy_name(trainers.back()->variant().policy))};
  for (BenchRow& row : make_rows(own, config, *trainers.back())) rows.push_back(std::move(row));
}

// Of the rows' own policies, --p2 would be ignored.
void check_policies(const BenchOptions& options) {
  const bool own = !options.ways.empty() || std::ranges::all_of(options.schedules, [](const std::string& asked) {
    return asked == kAutoSchedule || AskedSchedule(asked).policy;
  });
  TWOBP_CHECK(options.policies.empty() || !own, "--p2 has no effect: ",
              options.ways.empty() ? "each of the schedules has its own p2 policy" : "--ways have their own p2 policy");
}

// Each precision with each recomputation.
std::vector<Config> configs_of(const BenchOptions& options, const Config& config) {
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
  return configs;
}

int bench(BenchOptions options) {
  check_alone("bench", find_launcher());
  if (!options.kernels_folder.empty()) {
    std::error_code error;
    std::filesystem::create_directories(options.kernels_folder, error);
    TWOBP_CHECK(!error, "--kernels: cannot make the folder ", options.kernels_folder, ": ", error.message());
  }
  std::vector<std::string> overrides = options.overrides;
  if (!options.micro_batches.empty()) {  // some schedules need more than the configured number
    const int most = *std::max_element(options.micro_batches.begin(), options.micro_batches.end());
    overrides.push_back(concat("pipeline.micro_batches=", most));
  }
  const Config config = load_config(options.config, overrides);
  if (options.schedules.empty()) options.schedules = {config.pipeline.schedule};
  check_policies(options);
  std::vector<std::unique_ptr<Trainer>> trainers;
  std::vector<BenchRow> rows;
  for (const std::string& way : options.ways) add_way(way, options, overrides, trainers, rows);
  for (const Config& one : options.ways.empty() ? configs_of(options, config) : std::vector<Config>()) {
    std::set<std::vector<int>> placed;  // one pipeline for each placement of stages
    for (const std::string& asked : options.schedules) {
      const std::string schedule = AskedSchedule(asked).source.name();
      if (!placed.insert(placement_of(one, schedule)).second) continue;
      Config of_rows = config_for(one, schedule);
      // The same for all rows, which are all named if frozen layers may have stages of their own.
      const bool all_named = std::ranges::all_of(options.schedules, [](const std::string& each) {
        const ScheduleSource source = AskedSchedule(each).source;
        return source.written() == nullptr && source.name() != kAutoSchedule;
      });
      if (!all_named) of_rows.pipeline.stages = pipeline_shape(of_rows.pipeline).stages;
      check_config(of_rows);
      trainers.push_back(std::make_unique<Trainer>(of_rows));
      for (BenchRow& row : make_rows(options, one, *trainers.back())) rows.push_back(std::move(row));
    }
  }
  TWOBP_CHECK(!rows.empty(), "nothing to measure: with --p2 placed, give a schedule that places W, such as zb-v");
  // The rows are interleaved, and every other round runs in reverse order, so that a drift of the machine
  // affects all rows alike.
  for (int repeat = 0; repeat < options.repeat; ++repeat) {
    for (size_t i = 0; i < rows.size(); ++i) {
      BenchRow& row = rows[repeat % 2 == 0 ? i : rows.size() - 1 - i];
      measure(row, std::max(repeat == 0 ? options.warmup : 0, steps_until_graph(row)), options);
    }
  }
  print_bench_table(rows);
  if (!options.json_file.empty()) {
    json out = {
        {"machine", machine_to_json()}, {"config", json::parse(config_to_json(config))}, {"rows", json::array()}};
    for (const BenchRow& row : rows) out["rows"].push_back(bench_row_to_json(row));
    write_text(options.json_file, out.dump(1) + "\n");
  }
  if (!options.kernels_folder.empty()) trace_kernels_of(rows, options.kernels_folder);
  return 0;
}

}  // namespace

void add_bench_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<BenchOptions>();
  CLI::App* command = app.add_subcommand("bench", "Compare the step times of schedules and p2 policies, interleaved");
  command->add_option("config", options->config, "JSON file; without it, the defaults and --set");
  command->add_option("--set", options->overrides, "Override a key: section.key=value (see twobp train --help)")
      ->take_all();
  CLI::Option* schedules =
      command
          ->add_option("--schedules", options->schedules,
                       "naive, gpipe, 1f1b, ..., a .csv file, or auto (found by a search, with its own p2 policy); "
                       "NAME@POLICY runs only that p2 policy (default: as configured)")
          ->delimiter(',');
  CLI::Option* ways = command
                          ->add_option("--ways", options->ways,
                                       "Instead of --schedules: rows with their own settings, separated by spaces: "
                                       "\"pipeline.schedule=zb-v pipeline.p2=fill\" \"pipeline.split=[3,5]\"")
                          ->excludes(schedules);
  command
      ->add_option("--p2", options->policies,
                   "off, end, cooldown, fill, placed (placed: only schedules that place W) (default: " +
                       join(kPolicies, ",") + ")")
      ->delimiter(',');
  command->add_option("--p2-batching", options->batchings, "loop, concat (default: as configured)")->delimiter(',');
  command
      ->add_option("--memory-cap", options->caps,
                   "auto, a multiple of it such as 1.05x, 0 (no cap), or bytes (default: as configured)")
      ->delimiter(',');
  command->add_option("--precision", options->precisions, "fp32, bf16, fp16 (default: as configured)")
      ->delimiter(',')
      ->excludes(ways);
  command
      ->add_option("--recompute", options->recomputes,
                   "none, activations, derivatives, both: what layers recompute instead of keeping it; each mode gets "
                   "its own rows (default: as configured)")
      ->delimiter(',')
      ->excludes(ways);
  command->add_option("--micro-batches", options->micro_batches, "Numbers of micro-batches (default: as configured)")
      ->check(number_from(1, kMaxCount))
      ->delimiter(',');
  command->add_option("--repeat", options->repeat, "Rounds over all rows")
      ->check(number_from(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--steps", options->steps, "Timed steps per row and round")
      ->check(number_from(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--warmup", options->warmup, "Untimed steps of each row in the first round")
      ->check(number_from(0, 1 << 20))
      ->capture_default_str();
  command->add_option("--json", options->json_file, "File for the rows as JSON");
  command->add_option("--kernels", options->kernels_folder,
                      "Folder for a trace of one more step of each row by LibTorch's profiler (0.json, "
                      "1.json, ..., for Perfetto): operators, F, I and W, and on GPUs kernels; for a "
                      "graph (pipeline.graphs) only kernels");
  command->footer(
      "Columns:\n"
      "  speed      step time of the first row of the same M, divided by that of this row; median over "
      "interleaved samples\n"
      "  idle       1 - busy / step, mean over ranks\n"
      "  predicted  idle as simulated with the row's own times of F, I, W and optimizer\n"
      "  products   fraction of the busy time in matrix products and convolutions");
  command->callback([options, &exit_code] { exit_code = bench(*options); });
}

}  // namespace twobp
