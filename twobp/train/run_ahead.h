// pipeline.run_ahead: whether a rank begins the next step when it has ended its part of the current one.
#pragma once

#include <string>
#include <vector>

#include "twobp/pipeline/step_plan.h"
#include "twobp/train/config.h"

namespace twobp {

class Pipeline;

struct RunAhead {
  bool on = false;
  // Whether ranks also do not wait for the norm of all gradients, which clipping and float16 need. They take their step
  // as if it were neither clipped nor skipped, and take it back if it is (Update::settle).
  bool presumes = false;
  double gain = 1;  // simulated speed relative to a barrier

  static constexpr double kLeastGain = 1.02;  // "auto" requires more than this
};

// Decides by the configuration and, for "auto", by simulating the plan with the profiled costs. All processes use the
// first process's decision. Each calls this once its optimizers are made. `ties_ranks`: see Update. `batch` as for
// profiled_costs.
RunAhead decide_run_ahead(const Config& config, Pipeline& pipeline, const StepPlan& plan, bool ties_ranks,
                          const std::vector<double>& batch = {});

// "ranks begin the next step without waiting for each other (simulated: 1.07x as fast)".
std::string to_text(const RunAhead& run_ahead);

}  // namespace twobp
