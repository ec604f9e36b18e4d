// pipeline.run_ahead: whether ranks begin the next step when they have ended their part of this one.
#pragma once

#include <string>

#include "twobp/pipeline/step_setup.h"
#include "twobp/train/config.h"

namespace twobp {

class Pipeline;

struct RunAhead {
  bool on = false;
  // Ranks do not wait for the norm of all gradients, which clipping and float16 ask for, either: they take
  // their step as if it were neither clipped nor skipped, and take it back where it is (Update::settle).
  bool presumes = false;
  double gain = 1;  // times as fast as with a barrier, simulated

  static constexpr double kLeastGain = 1.02;  // "auto": what is not above is not worth it
};

// From the configuration and, for "auto", the simulation of the plan with the profiled costs: the first
// process's decision, on every process. Each of them calls it, once its optimizers are made. `ties_ranks`:
// see Update.
RunAhead decide_run_ahead(const Config& config, Pipeline& pipeline, const StepSetup& setup, bool ties_ranks);

// "ranks begin the next step without waiting for each other (simulated: 1.07x as fast)".
std::string to_text(const RunAhead& run_ahead);

}  // namespace twobp
