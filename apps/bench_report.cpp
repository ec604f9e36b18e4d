#include "apps/bench_report.h"

#include <algorithm>
#include <exception>
#include <filesystem>
#include <numeric>
#include <set>
#include <system_error>

#include <torch/csrc/autograd/profiler_kineto.h>

#include "apps/json_report.h"
#include "apps/print.h"
#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/core/text.h"
#include "twobp/models/model_type.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/stage.h"
#include "twobp/train/variant.h"

namespace twobp {
namespace {

using nlohmann::json;

std::string recompute_of(const BenchRow& row) {
  const auto& rules = row.trainer->config().pipeline.recompute;
  return rules.empty() ? "none" : join(rules);
}

std::vector<double> medians(const std::vector<std::vector<double>>& samples) {
  std::vector<double> out;
  for (const auto& sample : samples) out.push_back(median(sample));
  return out;
}

double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

}  // namespace

json bench_row_to_json(const BenchRow& row) {
  const Pipeline& pipeline = row.trainer->pipeline();
  json idle_seconds = json::array();
  for (const RankTimes& times : row.last) idle_seconds.push_back(idle_to_json(times));
  json optimizer_seconds = json::array();
  for (const RankTimes& times : row.last) optimizer_seconds.push_back(times.optimizer);
  const ProductTime& products = row.last_products;
  json allocations = json::array();
  for (const RankTimes& times : row.last) allocations.push_back(times.allocations);
  json stage_seconds = json::array();
  double p2_operations = 0;
  for (const StageTimes& times : row.stages) {
    const double n = std::max(1, times.micro_batches);
    stage_seconds.push_back({{"F", times.forward / n}, {"I", times.backward_p1 / n}, {"W", times.backward_p2 / n}});
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
          {"slices", pipeline.slices()},
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
          {"product_gflops", products.seconds > 0 ? products.operations / products.seconds / 1e9 : kUnknown},
          {"p2_seconds_all", row.p2_seconds},
          {"p2_gflops", p2_seconds > 0 ? p2_operations / p2_seconds / 1e9 : kUnknown},
          {"allocations", allocations},
          {"peak_bytes", row.peaks},
          {"peak_held_bytes", row.held},
          {"peak_gradient_bytes", row.gradients}};
}

void print_bench_table(const std::vector<BenchRow>& rows) {
  const InputKind input = rows.front().trainer->config().model.input().kind;
  std::vector<std::vector<std::string>> table = {{"precision", "schedule", "p2", "batching", "cap", "M", "step s",
                                                  "min - max", concat(item_name(input), "/s"), "speed", "idle",
                                                  "predicted", "products", "peak memory by rank"}};
  // Shows these columns only if their values differ from the usual.
  const bool recomputes =
      std::ranges::any_of(rows, [](const BenchRow& row) { return !row.trainer->config().pipeline.recompute.empty(); });
  const bool sliced =
      std::ranges::any_of(rows, [](const BenchRow& row) { return row.trainer->pipeline().slices() > 1; });
  const auto insert = [&](std::vector<std::string>& cells, const std::string& recompute, const std::string& slices) {
    if (sliced) cells.insert(cells.begin(), slices);
    if (recomputes) cells.insert(cells.begin(), recompute);
  };
  insert(table[0], "recompute", "slices");
  for (const BenchRow& row : rows) {
    // The speed is relative to the first row of the same M, sample by sample, because the two were timed in
    // turn.
    const BenchRow& base = *std::ranges::find_if(rows, [&](const BenchRow& other) {
      return other.batch.micro_batches.size() == row.batch.micro_batches.size();
    });
    std::vector<double> ratios;
    for (size_t i = 0; i < row.seconds.size(); ++i) ratios.push_back(base.seconds[i] / row.seconds[i]);
    std::vector<std::string> peaks;
    for (const int64_t peak : row.peaks) peaks.push_back(format_bytes(static_cast<double>(peak)));
    const auto [fastest, slowest] = std::ranges::minmax(row.seconds);
    const double seconds = median(row.seconds);
    table.push_back({row.trainer->config().train.precision, row.schedule, std::string(policy_name(row.variant.policy)),
                     std::string(batching_name(row.variant.batching)), row.cap,
                     std::to_string(row.batch.micro_batches.size()), fixed(seconds, 4),
                     concat(fixed(fastest, 4), " - ", fixed(slowest, 4)),
                     fixed(static_cast<double>(row.batch.tokens) / seconds, 0), concat(fixed(median(ratios), 3), "x"),
                     fixed(mean(medians(row.idle)), 3), fixed(mean(medians(row.predicted)), 3),
                     fixed(median(row.products), 3), join(peaks, " | ")});
    insert(table.back(), recompute_of(row), std::to_string(row.trainer->pipeline().slices()));
  }
  print_table(table);
  for (const BenchRow& row : rows) {
    if (row.schedule != kAutoSchedule) continue;
    print("M %zu, cap %s: %s\n", row.batch.micro_batches.size(), row.cap.c_str(), row.variant.schedule.name().c_str());
  }
}

void trace_kernels(const std::string& path, bool on_gpu, const std::function<void()>& step) {
  using torch::profiler::impl::ActivityType;
  namespace profiler = torch::autograd::profiler;
  torch::profiler::impl::ExperimentalConfig more;
  more.profile_all_threads = true;  // the ranks' threads were started earlier
  const torch::profiler::impl::ProfilerConfig config(
      torch::profiler::impl::ProfilerState::KINETO, /*report_input_shapes=*/false, /*profile_memory=*/false,
      /*with_stack=*/false, /*with_flops=*/false, /*with_modules=*/false, more);
  std::set<ActivityType> activities = {ActivityType::CPU};
  if (on_gpu) activities.insert(ActivityType::CUDA);
  std::error_code no_file;
  std::filesystem::remove(path, no_file);  // the profiler does not report a file that it cannot write
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
  std::exception_ptr error;
  try {
    step();
  } catch (...) {
    error = std::current_exception();
  }
  const auto result = profiler::disableProfiler();
  if (error) std::rethrow_exception(error);
  result->save(path);
  TWOBP_CHECK(std::filesystem::exists(path, no_file), "cannot write ", path, ": the profiler's trace of a step");
}

}  // namespace twobp
