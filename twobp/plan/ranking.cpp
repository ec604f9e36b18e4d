#include "twobp/plan/ranking.h"

#include <algorithm>
#include <cstddef>

namespace twobp {
namespace {

constexpr double kSameSpeed = 0.99;
constexpr double kSameBytes = 1.05;

bool before(const PlanChoice& a, const PlanChoice& b) {
  const double fast_a = a.samples_per_second();
  const double fast_b = b.samples_per_second();
  if (fast_a != fast_b) return fast_a > fast_b;
  return a.peak_bytes < b.peak_bytes;
}

}  // namespace

void insert_by_speed(std::vector<PlanChoice>& best, const PlanChoice& choice, size_t most) {
  best.insert(std::upper_bound(best.begin(), best.end(), choice, before), choice);
  if (best.size() > most) best.pop_back();
}

std::vector<PlanChoice>::iterator lightest_of_fastest(std::vector<PlanChoice>& best) {
  const double fast = kSameSpeed * best.front().samples_per_second();
  const auto compared = best.begin() + static_cast<std::ptrdiff_t>(std::min(best.size(), kCompared));
  const auto end = std::find_if(best.begin(), compared,
                                [&](const PlanChoice& choice) { return choice.samples_per_second() < fast; });
  const auto lightest =
      std::min_element(best.begin(), end, [](const auto& a, const auto& b) { return a.peak_bytes < b.peak_bytes; });
  const double light = kSameBytes * lightest->peak_bytes;
  return std::find_if(best.begin(), end, [&](const PlanChoice& choice) { return choice.peak_bytes <= light; });
}

}  // namespace twobp
