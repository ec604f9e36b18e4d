// Tests over a matrix of cases run a part of it, and all of it with TWOBP_EVERY_WAY, as the slow tests set it.
#pragma once

#include <cstdlib>

namespace twobp::test {

inline bool every_way() {
  return std::getenv("TWOBP_EVERY_WAY") != nullptr;
}

// An eighth of the rounds of a test with random cases.
inline int rounds(int all) {
  return every_way() ? all : (all + 7) / 8;
}

}  // namespace twobp::test
