// The measurements of `twobp bench`: one row of its table, the output of rows as a table and as JSON, and a
// trace of a step's operators.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "twobp/pipeline/observer.h"
#include "twobp/train/trainer.h"
#include "twobp/train/variant.h"

namespace twobp {

// A row is a way to run a step, with its measurements. kUnknown (core/text.h) stands for values that are not
// measured: the parts of a step that is launched as a graph, and products on a GPU.
struct BenchRow {
  Trainer* trainer = nullptr;
  std::string schedule;  // as given on the command line
  Variant variant;
  std::string cap;
  Batch batch;
  std::vector<double> batch_costs;  // of its micro-batches, over the mean of all samples; empty: they are equal
  std::vector<double> seconds;
  std::vector<std::vector<double>> idle;       // [rank][sample]
  std::vector<std::vector<double>> predicted;  // [rank][sample]
  std::vector<double> predicted_seconds;
  std::vector<double> products;    // by sample: share of the ranks' busy time
  std::vector<double> p2_seconds;  // by sample: of all stages
  // The report of the last step.
  std::vector<RankTimes> last;
  ProductTime last_products;
  std::vector<StageTimes> stages;
  std::vector<int64_t> peaks;      // by rank
  std::vector<int64_t> held;       // of these, activations and stash
  std::vector<int64_t> gradients;  // likewise
};

nlohmann::json bench_row_to_json(const BenchRow& row);
void print_bench_table(const std::vector<BenchRow>& rows);

// Runs `step` and writes a trace of its operators, and on a GPU (`on_gpu`) of the kernels of all of this
// process's GPUs, as LibTorch's profiler (Kineto, CUPTI) records them. It is in Chrome's trace format, for
// Perfetto. A rank's F, I and W are ranges of these names on its thread, unless the step is launched as a
// graph. Each kernel has its estimated occupancy of the multiprocessors. Throws Error naming the file if it
// cannot be written.
void trace_kernels(const std::string& path, bool on_gpu, const std::function<void()>& step);

}  // namespace twobp
