// The beginning of a step in which only F runs. It can be run again, because it adds to no gradient and computes no
// loss.
#pragma once

#include <cstddef>
#include <vector>

#include "twobp/schedule/schedule.h"

namespace twobp {

struct LeadingForwards {
  std::vector<size_t> end;  // by rank: the first instruction after them
  // By rank: the receives after `end` whose messages other ranks send before their own `end`.
  std::vector<std::vector<Instruction>> unreceived;
};

// The leading forwards are F of all stages but the last one (of each copy of the model) and their messages. They extend
// in every rank's list as far as all ranks get with these alone, so none of them waits for an I.
LeadingForwards leading_forwards(const Schedule& schedule);

}  // namespace twobp
