// Transports whose sends block until the receiver takes the message: whether a schedule ends on them, and
// orders that do.
#pragma once

#include <vector>

#include "twobp/schedule/schedule.h"

namespace twobp {

// Where each rank stops when a send goes on only while its receiver stands at the receive: an index into its
// list, its size when it ran to the end; anything less is a deadlock. The schedule must be valid otherwise.
std::vector<size_t> rendezvous_stops(const Schedule& schedule);

// The same ops in the same order on every rank, with every receive moved forward to the moment when its send
// is due (F, I and W taken to cost one unit each, messages nothing), so that all sends and receives follow
// one order: no deadlock under rendezvous, and at unit costs no time lost. Messages of a range of
// micro-batches go one by one. The price: a rank holds what it takes early.
// What generators and add_communication make may block: a rank of 1f1b that sends F forward meets a
// neighbour that sends dL/dx back. The schedule must be valid.
Schedule order_for_rendezvous(Schedule schedule);

}  // namespace twobp
