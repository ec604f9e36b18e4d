#include "apps/json_report.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <thread>

#include "twobp/nn/kernels/rows/row_kernels.h"
#include "twobp/pipeline/pipeline.h"

namespace twobp {

using nlohmann::json;

json idle_to_json(const RankTimes& times) {
  json idle;
  for (int cause = 0; cause < kIdleCauses; ++cause) {
    idle[std::string(idle_cause_name(static_cast<IdleCause>(cause)))] = times.idle[cause];
  }
  return idle;
}

json step_to_json(const StepResult& result, const std::optional<Evaluation>& held_out) {
  const StepReport& report = result.report;
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  json line = {{"step", result.step},
               {"time", now.count()},  // seconds since 1970
               {"loss", result.loss},
               {"lr", result.lr},
               {"grad_norm", result.grad_norm},
               {"tokens", result.tokens},
               {"step_seconds", report.seconds()},
               {"tokens_per_second", static_cast<double>(result.tokens) / report.seconds()},
               {"input_wait_seconds", result.input_wait}};
  if (held_out) line["held_out_loss"] = held_out->loss;
  if (held_out && held_out->accuracy) line["held_out_accuracy"] = *held_out->accuracy;
  if (result.loss_scale != 1) {
    line["skipped"] = result.skipped;
    line["loss_scale"] = result.loss_scale;
  }
  line["idle_fraction"] = json::array();
  line["idle_seconds"] = json::array();
  for (size_t r = 0; r < report.ranks.size(); ++r) {
    line["idle_fraction"].push_back(report.idle_fraction(static_cast<int>(r)));
    line["idle_seconds"].push_back(idle_to_json(report.ranks[r]));
  }
  const auto waits_for_sums = [](const RankTimes& times) { return times.exposed > 0; };
  if (std::any_of(report.ranks.begin(), report.ranks.end(), waits_for_sums)) {
    for (const RankTimes& times : report.ranks) line["exposed_seconds"].push_back(times.exposed);
  }
  for (const ExpertTokens& experts : report.experts) {
    line["experts"].push_back(
        {{"layer", experts.layer}, {"imbalance", experts.imbalance()}, {"tokens", experts.tokens}});
  }
  line["peak_bytes"] = json::array();
  line["peak_bytes_by_category"] = json::array();
  for (const MemoryUse& use : report.stage_memory) {
    line["peak_bytes"].push_back(use.peak);
    json split;
    for (int c = 0; c < kMemoryCategories; ++c) {
      split[std::string(category_name(static_cast<MemoryCategory>(c)))] = use.at_peak[c];
    }
    line["peak_bytes_by_category"].push_back(split);
  }
  return line;
}

json machine_to_json() {
  std::string model = "unknown";
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    if (line.rfind("model name", 0) == 0) {
      model = line.substr(line.find(':') + 2);
      break;
    }
  }
  return {{"cpu", model}, {"cores", std::thread::hardware_concurrency()}, {"kernels", kernel_instruction_set()}};
}

}  // namespace twobp
