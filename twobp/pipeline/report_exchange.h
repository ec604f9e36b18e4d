// A step's report as a message, from the processes that hold parts of it to the process that shows it.
#pragma once

#include <vector>

#include "twobp/nn/values.h"
#include "twobp/pipeline/observer.h"
#include "twobp/transport/world.h"

namespace twobp {

// Packs what `report` says about these ranks and stages, with its events if it has any.
Values pack_report(const StepReport& report, const std::vector<int>& ranks, const std::vector<int>& stages);

// Unpacks into `report`, whose vectors have room, and subtracts `clock_ahead` seconds from all times. Throws Error if
// the message does not fit these ranks and stages.
void unpack_report(const Values& packed, const std::vector<int>& ranks, const std::vector<int>& stages,
                   double clock_ahead, StepReport& report);

// Sums loss, correct predictions and `numbers` over all processes; `stop` is true if any process wants to stop. The
// sums are an Exchange, in which the first process gets the others' `packed` reports. Returns them there, by process.
std::vector<Values> exchange_report(const World& world, double timeout, StepReport& report, const Values& packed,
                                    const std::vector<at::Tensor>& numbers);

}  // namespace twobp
