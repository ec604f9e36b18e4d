// Compares a real run with the simulation of the same schedule, to judge the simulator.
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
  // By stage: mean seconds of F, I and W as measured. Bytes are as profiled before the run, except weights, gradients
  // and optimizer state, which are measured (on the rank's first stage).
  std::vector<StageCost> costs;
  double message_seconds = 0;  // median time of the messages that a rank waited for
  Simulation simulation;       // with these costs, under the run's own rules
  StepReport step;             // the simulation in the form of a step, in seconds and bytes

  Compared step_seconds;             // measured: the mean over the steps
  std::vector<Compared> idle;        // by rank: 1 - (F + I + W + optimizer) / step
  std::vector<Compared> peak_bytes;  // by rank, all bytes; measured: the most of any step
  bool replayed = false;             // bytes under `fill`: predicted by replaying the recorded order of W
  int steps = 0;                     // number of steps compared: those with all of the schedule's micro-batches
};

// Throws Error for a trace without a run (see read_trace.h) or without any whole step.
Comparison compare(const Trace& trace);

}  // namespace twobp
