// The memory of a receiver: messages that arrive before the rank takes them.
#pragma once

#include <vector>

#include "twobp/schedule/schedule.h"

namespace twobp {

// The most messages that can wait for one rank, whatever the ops cost, and the receive at which the rank is then.
struct MostBuffered {
  int messages = 0;
  int index = -1;  // into the rank's list
};

// By rank. Sends never block here; this is the room that their messages may need. Takes time proportional to ranks
// times instructions. The schedule must be valid.
std::vector<MostBuffered> most_buffered(const Schedule& schedule);

}  // namespace twobp
