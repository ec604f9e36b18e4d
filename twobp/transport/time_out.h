// What a transport says when a wait has taken too long: the same words on each.
#pragma once

#include "twobp/transport/transport.h"

namespace twobp {

// Throws Error: `rank` waited `timeout` seconds for the message `tag` from rank `from`.
[[noreturn]] void fail_waiting(int rank, double timeout, const Tag& tag, int from);
// Throws Error: what `rank` sent to rank `to` was not taken for `timeout` seconds.
[[noreturn]] void fail_sending(int rank, double timeout, int to);

}  // namespace twobp
