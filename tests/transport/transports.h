// The conformance suite runs on these transports. To add one, write a world for it and add a line to `worlds()`. A
// world runs a function once for each rank. Each call has its own endpoint, and the world rethrows the first exception.
// The functions share no memory between ranks, so ranks may be processes. A world of processes runs the function for
// its own rank, and skips the test if there are fewer processes than ranks.
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
  bool device_waits = false;  // for expected messages: the rank has them before they have arrived (nccl_test.cpp)
};

// GoogleTest uses this in its messages.
inline void PrintTo(const World& world, std::ostream* out) {
  *out << world.name;
}

std::vector<World> worlds();

// This is a suite of tests that run on each transport.
class OnEveryTransport : public ::testing::TestWithParam<World> {
 protected:
  static void run(int ranks, const RankBody& body) { GetParam().run(ranks, body); }
};

inline std::string name_of_world(const ::testing::TestParamInfo<World>& info) {
  return info.param.name;
}

}  // namespace twobp::test
