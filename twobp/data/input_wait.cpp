#include "twobp/data/input_wait.h"

#include "twobp/core/check.h"
#include "twobp/core/text.h"

namespace twobp {
namespace {

constexpr int64_t kWarmUpSteps = 2;
constexpr int64_t kCounted = 10;
constexpr double kMuch = 0.01;  // fraction of the time
constexpr double kSeconds = 1;  // in total; less is not worth a warning

}  // namespace

std::optional<std::string> InputWait::after_step(double waited, double took) {
  if (warned_ || ++steps_ <= kWarmUpSteps) return std::nullopt;
  waited_ += waited;
  took_ += waited + took;
  const int64_t counted = steps_ - kWarmUpSteps;
  if (counted < kCounted || waited_ <= kMuch * took_ || waited_ < kSeconds) return std::nullopt;
  warned_ = true;
  return concat("training waits for data ", static_cast<int64_t>(1000 * waited_ / took_) / 10.0, "% of the time, ",
                format_seconds(waited_ / static_cast<double>(counted)), " per step: raise data.workers (now ", workers_,
                "), or make the data cheaper to read: smaller pictures, a faster disk, data.arrays");
}

}  // namespace twobp
