// The errors of a transport when a wait takes too long, with the same text for every transport.
#pragma once

#include <vector>

#include "twobp/transport/transport.h"

namespace twobp {

// "rank 3", "ranks 0, 1, 2", and of many the first ones and the number of the others. `ranks` is not empty.
std::string names_of_ranks(const std::vector<int>& ranks);

// Throws Error: `rank` waited `timeout` seconds for the message `tag` from rank `from`.
[[noreturn]] void fail_waiting(int rank, double timeout, const Tag& tag, int from);
// Throws Error: `rank` waited `timeout` seconds for a sum over `ranks`.
[[noreturn]] void fail_summing(int rank, double timeout, const std::vector<int>& ranks);
// Throws Error: rank `to` did not take a message of `rank` within `timeout` seconds.
[[noreturn]] void fail_sending(int rank, double timeout, int to);

}  // namespace twobp
