// The formulas of the header.
#include "twobp/train/update/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>
#include <vector>

#include "twobp/core/check.h"
#include "twobp/core/text.h"

namespace twobp {

double learning_rate(const OptimizerConfig& config, int64_t step, int64_t total_steps) {
  TWOBP_CHECK(step >= 0, "learning_rate: step ", step, ", but steps are counted from 0.");
  const std::vector<std::string> known = {"constant", "linear", "cosine", "wsd", "inverse_sqrt"};
  const std::string& schedule = config.schedule;
  TWOBP_CHECK(std::find(known.begin(), known.end(), schedule) != known.end(), "optimizer.schedule is \"", schedule,
              "\", which is unknown: did you mean \"", nearest(schedule, known), "\"?");
  if (step < config.warmup) {
    return config.lr * static_cast<double>(step + 1) / static_cast<double>(config.warmup + 1);
  }
  if (schedule == "constant") return config.lr;
  if (schedule == "inverse_sqrt") {
    const auto time = static_cast<double>(config.warmup > 0 ? config.warmup : 10000);
    return config.lr * std::sqrt(time / (time + static_cast<double>(step - config.warmup)));
  }
  int64_t begin = config.warmup;
  if (schedule == "wsd") {
    const int64_t decay = config.decay > 0 ? config.decay : std::max<int64_t>(1, total_steps / 10);
    begin = std::max(begin, total_steps - decay);
  }
  const auto done = static_cast<double>(std::max<int64_t>(step - begin, 0));
  const auto steps = static_cast<double>(std::max<int64_t>(total_steps - begin, 1));
  const double p = std::min(done / steps, 1.0);
  if (schedule == "cosine")
    return config.min_lr + (config.lr - config.min_lr) * (1 + std::cos(std::numbers::pi * p)) / 2;
  return config.lr + (config.min_lr - config.lr) * p;
}

}  // namespace twobp
