// The part at the beginning of a step in which nothing but F runs: it can be run again, since it adds to no
// gradient and has no loss.
#pragma once

#include <cstddef>
#include <vector>

#include "twobp/schedule/schedule.h"

namespace twobp {

struct LeadingForwards {
  std::vector<size_t> end;  // by rank: the first instruction behind them
  // By rank: the receives, all behind `end`, of messages that other ranks send before theirs.
  std::vector<std::vector<Instruction>> unreceived;
};

// F of all stages but the last one (of each copy of the model) and their messages: in every rank's list as
// far as all ranks get with these alone, so that none of them waits for an I.
LeadingForwards leading_forwards(const Schedule& schedule);

}  // namespace twobp
