// What the executor tells about a step: a report, and every op with its times.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "twobp/pipeline/memory_meter.h"
#include "twobp/schedule/schedule.h"
#include "twobp/schedule/simulate.h"

namespace twobp {

// One op of one rank. W events are single units (one layer, one or several micro-batches); the others whole
// stages.
struct Event {
  enum class Kind : uint8_t { kForward, kBackwardP1, kBackwardP2, kOptimizer, kIdle };
  Kind kind = Kind::kForward;
  int stage = -1;
  int micro_batch = -1;
  int layer = -1;    // within the stage, for W
  double begin = 0;  // seconds on the monotonic clock
  double end = 0;
};

// Seconds a stage spent, and how often: the mean is what one micro-batch costs.
struct StageTimes {
  double forward = 0;
  double backward_p1 = 0;
  double backward_p2 = 0;
  int micro_batches = 0;
  int p2_units = 0;  // per micro-batch
};

struct RankTimes {
  double begin = 0;  // first instruction
  double end = 0;    // optimizer done
  double optimizer = 0;
  double busy = 0;  // F + I + W + optimizer
  std::array<double, kIdleCauses>
      idle{};  // by IdleCause; what is left of the step is the executor's own time
  int64_t instructions = 0;
};

struct StepReport {
  int64_t step = 0;
  double begin = 0;
  double end = 0;
  double loss = 0;  // sum of the micro-batches' shares: the mean over the global batch
  std::vector<RankTimes> ranks;
  std::vector<StageTimes> stages;
  std::vector<MemoryUse> stage_memory;
  std::vector<MemoryUse> rank_memory;
  std::vector<std::vector<Event>> events;  // by rank; only if asked for

  double seconds() const { return end - begin; }
  double idle_fraction(int rank) const { return 1 - ranks[rank].busy / seconds(); }
  double mean_idle() const {
    double sum = 0;
    for (size_t r = 0; r < ranks.size(); ++r) sum += idle_fraction(static_cast<int>(r));
    return sum / static_cast<double>(ranks.size());
  }
};

// Told about every step, on the thread that runs the training loop, after the step is over.
class Observer {
 public:
  virtual ~Observer() = default;
  virtual bool wants_events() const { return false; }
  virtual void on_step(const StepReport& report) = 0;
};

}  // namespace twobp
