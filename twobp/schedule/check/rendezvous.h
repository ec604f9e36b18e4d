// Transports whose sends block until the receiver takes the message: whether a schedule can finish on them, and orders
// that can.
#pragma once

#include <vector>

#include "twobp/schedule/schedule.h"

namespace twobp {

// The place where each rank stops if a send only goes on while its receiver is at the receive. It is an index into the
// rank's list, or the list's size if the rank ran to the end. Anything less is a deadlock. Apart from that, the
// schedule must be valid.
std::vector<size_t> rendezvous_stops(const Schedule& schedule);

// The same ops in the same order on every rank, with every receive moved forward to the moment when its send is due.
// (Here F, I and W cost one unit each, and messages nothing.) So all sends and receives follow one order: there is no
// deadlock under rendezvous, and at unit costs no time is lost. Messages of a range of micro-batches go one by one. The
// price is that a rank holds the messages that it takes early.
// The results of generators and add_communication may block: a rank of 1f1b that sends F forward meets a neighbour that
// sends dL/dx back. The schedule must be valid.
Schedule order_for_rendezvous(Schedule schedule);

}  // namespace twobp
