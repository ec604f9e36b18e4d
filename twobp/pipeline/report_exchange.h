// A step's report as a message: from the processes that have parts of it to the one that shows it.
#pragma once

#include <vector>

#include "twobp/nn/values.h"
#include "twobp/pipeline/observer.h"
#include "twobp/transport/transport.h"

namespace twobp {

// What `report` says of these ranks and stages, with its events if there are any.
Values pack_report(const StepReport& report, const std::vector<int>& ranks, const std::vector<int>& stages);

// Puts it into `report`, whose vectors have room; times less `clock_ahead` seconds. Throws Error if it is not
// of these ranks and stages.
void unpack_report(const Values& packed, const std::vector<int>& ranks, const std::vector<int>& stages,
                   double clock_ahead, StepReport& report);

// Loss, correct predictions and `stop` of all processes.
void sum_report(Transport& processes, double timeout, StepReport& report);

}  // namespace twobp
