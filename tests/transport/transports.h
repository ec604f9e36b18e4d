// The transports that the conformance suite runs on. To add one, write a world for it and add a line to
// `worlds()`: a world runs a function once for each rank, each with its own endpoint, and rethrows what a
// rank throws first. The functions share no memory between ranks, so that ranks may be processes: such a
// world runs the function for its own rank, and skips the test where there are fewer processes than ranks.
#pragma once

#include <functional>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "twobp/transport/transport.h"

namespace twobp::test {

using RankBody = std::function<void(Transport&)>;

struct World {
  std::string name;
  // Runs `body` on every rank at once and waits for all of them.
  std::function<void(int ranks, const RankBody& body)> run;
  int most_ranks = std::numeric_limits<int>::max();
};

// For GoogleTest's messages.
inline void PrintTo(const World& world, std::ostream* out) {
  *out << world.name;
}

std::vector<World> worlds();

// A suite of tests that run on each of them.
class OnEveryTransport : public ::testing::TestWithParam<World> {
 protected:
  static void run(int ranks, const RankBody& body) { GetParam().run(ranks, body); }
};

inline std::string name_of_world(const ::testing::TestParamInfo<World>& info) {
  return info.param.name;
}

}  // namespace twobp::test
