// The formulas of the header.
#include "twobp/train/update/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "twobp/core/check.h"
#include "twobp/core/text.h"

namespace twobp {

double learning_rate(const OptimizerConfig& config, int64_t step, int64_t total_steps) {
  TWOBP_CHECK(step >= 0, "learning_rate: step ", step, ", but steps are counted from 0.");
  const bool linear = config.schedule == "linear";
  const bool cosine = config.schedule == "cosine";
  TWOBP_CHECK(linear || cosine || config.schedule == "constant", "optimizer.schedule is \"", config.schedule,
              "\", which is unknown: did you mean \"",
              nearest(config.schedule, {"constant", "linear", "cosine"}), "\"?");
  if (step < config.warmup) {
    return config.lr * static_cast<double>(step + 1) / static_cast<double>(config.warmup + 1);
  }
  if (!linear && !cosine) return config.lr;

  const auto done = static_cast<double>(step - config.warmup);
  const auto steps = static_cast<double>(std::max<int64_t>(total_steps - config.warmup, 1));
  const double p = std::min(done / steps, 1.0);
  if (linear) return config.lr + (config.min_lr - config.lr) * p;
  return config.min_lr + (config.lr - config.min_lr) * (1 + std::cos(std::numbers::pi * p)) / 2;
}

}  // namespace twobp
