// The speed of a link between two ranks, for measurements and plans.
#pragma once

namespace twobp {

struct LinkSpeed {
  double latency = 0;           // seconds from a send until a small message has been received
  double bytes_per_second = 0;  // of large messages; 0: no limit
};

}  // namespace twobp
