// The cost model of a configured model on this machine.
#pragma once

#include <string>
#include <vector>

#include "twobp/plan/cost_model.h"
#include "twobp/train/config.h"

namespace twobp {

struct MeasureOptions {
  std::vector<int> micro_batch_sizes;  // samples; empty: the configured one
  bool only_what_fits = false;         // sizes above the number of samples are left out, not refused
  double seconds = 1;                  // about, for each size and recomputation
  std::vector<std::string> recompute;  // of recompute_modes(): measured beside none
};

// One layer of each kind on the first samples of the configured data, as training would measure it, its
// optimizer step, and the link between two ranks of this process. Throws Error: too few samples,
// recomputation beside a configured one, and what building the model and opening the data throw.
CostModel measure_costs(const Config& config, const MeasureOptions& options);

}  // namespace twobp
