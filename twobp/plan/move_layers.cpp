#include <cstddef>
#include <utility>

#include "twobp/plan/planner.h"

namespace twobp {
namespace {

// A smaller gain is within the error of measured costs.
constexpr double kWorthIt = 1e-3;

class Mover {
 public:
  Mover(std::vector<int> split, double seconds, int most, const SecondsOfSplit& seconds_of)
      : split_(std::move(split)), seconds_(seconds), left_(most), seconds_of_(seconds_of) {}

  std::vector<int> run() {
    while (moved_one() || moved_two()) {
    }
    return std::move(split_);
  }

 private:
  // Moves `by` layers across the boundary after a stage: 1 forwards, -1 backwards.
  static void shift(std::vector<int>& split, size_t boundary, int by) {
    split[boundary] -= by;
    split[boundary + 1] += by;
  }

  bool take_if_faster(const std::vector<int>& split) {
    for (const int count : split) {
      if (count < 1) return false;
    }
    if (left_ == 0) return false;
    --left_;
    const std::optional<double> seconds = seconds_of_(split);
    if (!seconds || *seconds >= seconds_ * (1 - kWorthIt)) return false;
    split_ = split;
    seconds_ = *seconds;
    return true;
  }

  bool moved_one() {
    for (size_t b = 0; b + 1 < split_.size(); ++b) {
      for (const int by : {1, -1}) {
        std::vector<int> moved = split_;
        shift(moved, b, by);
        if (take_if_faster(moved)) return true;
      }
    }
    return false;
  }

  // A layer that one boundary takes from a rank may be given back at another.
  bool moved_two() {
    for (size_t a = 0; a + 1 < split_.size(); ++a) {
      for (size_t b = a + 1; b + 1 < split_.size(); ++b) {
        for (const int by_a : {1, -1}) {
          for (const int by_b : {1, -1}) {
            std::vector<int> moved = split_;
            shift(moved, a, by_a);
            shift(moved, b, by_b);
            if (take_if_faster(moved)) return true;
            if (left_ == 0) return false;
          }
        }
      }
    }
    return false;
  }

  std::vector<int> split_;
  double seconds_;
  int left_;  // splits that may still be tried
  const SecondsOfSplit& seconds_of_;
};

}  // namespace

std::vector<int> move_layers(std::vector<int> split, double seconds, int most, const SecondsOfSplit& seconds_of) {
  return Mover(std::move(split), seconds, most, seconds_of).run();
}

}  // namespace twobp
