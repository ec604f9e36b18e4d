#include "twobp/pipeline/memory/byte_cap.h"

#include <algorithm>
#include <cmath>

#include "twobp/core/check.h"
#include "twobp/schedule/simulate/stage_cost.h"

namespace twobp {
namespace {

class Walk {
 public:
  void grow(double peak, double held) {
    highest_ = std::max(highest_, now_ + peak);
    now_ += held;
    highest_ = std::max(highest_, now_);
  }
  int64_t highest() const { return static_cast<int64_t>(highest_); }

 private:
  double now_ = 0;  // bytes
  double highest_ = 0;
};

}  // namespace

std::vector<int64_t> standard_peaks(const Schedule& schedule, const std::vector<std::vector<LayerCost>>& stages) {
  const auto count = static_cast<size_t>(schedule.stages);
  TWOBP_CHECK(stages.size() == count || stages.size() == count * schedule.slices, "there are costs for ", stages.size(),
              " stages, but the schedule has ", schedule.stages);
  std::vector<int64_t> peaks;
  for (const auto& instructions : schedule.ranks) {
    Walk walk;
    for (const Instruction& instruction : instructions) {
      const size_t at = cost_index(schedule, stages, instruction.stage, instruction.micro_batch);
      const auto& layers = stages[at];
      switch (instruction.op) {
        case Op::kRecvForward:
          walk.grow(0, stages[at - 1].back().output);
          break;
        case Op::kRecvBackward:
          walk.grow(0, stages[at + 1].front().input_gradient);
          break;
        case Op::kSendForward:
          walk.grow(0, -layers.back().output);
          break;
        case Op::kSendBackward:
          walk.grow(0, -layers.front().input_gradient);
          break;
        case Op::kForward:
          for (const LayerCost& layer : layers) walk.grow(layer.forward_peak, layer.forward_held);
          if (instruction.stage + 1 == schedule.stages)
            walk.grow(0, -layers.back().output);  // the loss is read out and freed
          break;
        case Op::kBackward:
          for (auto layer = layers.rbegin(); layer != layers.rend(); ++layer) {
            walk.grow(layer->p1_peak, layer->p1_held);
            walk.grow(layer->p2_peak, -layer->stash);
          }
          break;
        case Op::kBackwardP1:
        case Op::kBackwardP2:
          fail("standard_peaks takes a schedule with p2 off, but this one has ", to_string(instruction));
      }
    }
    peaks.push_back(walk.highest());
  }
  return peaks;
}

std::vector<int64_t> auto_caps(const std::vector<int64_t>& standard_peaks, const std::vector<int64_t>& fixed,
                               double times) {
  int64_t fullest = 0;
  for (size_t r = 0; r < fixed.size(); ++r) fullest = std::max(fullest, fixed[r] + standard_peaks[r]);
  const auto allowed = static_cast<int64_t>(std::floor(static_cast<double>(fullest) * times));
  std::vector<int64_t> caps;
  // At least 1, because 0 means no cap.
  for (const int64_t bytes : fixed) caps.push_back(std::max<int64_t>(1, allowed - bytes));
  return caps;
}

}  // namespace twobp
