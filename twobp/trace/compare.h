// A real run beside the simulation of the same schedule: what the simulator is worth.
#pragma once

#include <vector>

#include "twobp/schedule/simulate/simulate.h"
#include "twobp/trace/recorder.h"

namespace twobp {

struct Compared {
  double predicted = 0;
  double measured = 0;
};

struct Comparison {
  // By stage: mean seconds of F, I and W as measured; bytes as profiled before the run, but for weights,
  // gradients and optimizer state, which are the measured ones (on the rank's first stage).
  std::vector<StageCost> costs;
  double message_seconds = 0;  // median time of the messages that a rank waited for
  Simulation simulation;       // with these costs, under the run's own rules
  StepReport step;             // the simulation as a step, in seconds and bytes

  Compared step_seconds;             // measured: the mean of the steps
  std::vector<Compared> idle;        // by rank: 1 - (F + I + W + optimizer) / step
  std::vector<Compared> peak_bytes;  // by rank, all there is; measured: the most of any step
  bool replayed = false;             // bytes under `fill`: predicted by replaying the recorded order of W
  int steps = 0;                     // that were compared: those with all of the schedule's micro-batches
};

// Throws Error for a trace without a run (see read_trace.h) or without any whole step.
Comparison compare(const Trace& trace);

}  // namespace twobp
