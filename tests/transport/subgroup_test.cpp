// Tests groups of some ranks of a network. Their members are renumbered and have messages of their own. One abort ends
// all.
#include "twobp/transport/subgroup.h"

#include <gtest/gtest.h>

#include "tests/expect_error.h"
#include "twobp/transport/collectives.h"
#include "twobp/transport/threads/in_process.h"
#include "twobp/transport/world.h"

namespace twobp::TWOBP_FILE {
namespace {

constexpr double kLong = 60;  // seconds

double first_of(const Values& values) {
  return values.at(0).view({-1})[0].item<double>();
}

TEST(Subgroup, NumbersItsMembers) {
  const auto network = make_in_process_transports(4, 0);
  Subgroup one(*network[3], {3, 1}, Group::kReplicas);
  Subgroup other(*network[1], {3, 1}, Group::kReplicas);
  EXPECT_EQ(one.rank(), 0);
  EXPECT_EQ(other.rank(), 1);
  EXPECT_EQ(one.size(), 2);
  one.isend(1, {.step = 5}, {at::full({1}, 7.0)});
  EXPECT_EQ(first_of(other.receive(0, {.step = 5}, kLong)), 7);
  Values values;
  EXPECT_FALSE(network[1]->try_receive(3, {.step = 5}, values)) << "the group's, not the network's";
  test::expect_error([&] { Subgroup(*network[0], {3, 1}, Group::kReplicas); }, {"rank 0 is not a member of the group"});
}

TEST(Subgroup, GroupsOfTheSameRanksDoNotMix) {
  const auto network = make_in_process_transports(2, 0);
  std::vector<std::unique_ptr<Subgroup>> ends;
  for (const auto group : {Group::kPipeline, Group::kReplicas, Group::kProcesses}) {
    for (int r = 0; r < 2; ++r) ends.push_back(std::make_unique<Subgroup>(*network[r], std::vector{0, 1}, group));
  }
  network[0]->isend(1, {}, {at::full({1}, 9.0)});
  for (int g = 0; g < 3; ++g) ends[2 * g]->isend(1, {}, {at::full({1}, static_cast<double>(g))});
  for (int g = 2; g >= 0; --g) EXPECT_EQ(first_of(ends[2 * g + 1]->receive(0, {}, kLong)), g);
  EXPECT_EQ(first_of(network[1]->receive(0, {}, kLong)), 9);
}

TEST(Subgroup, AbortReachesOutsiders) {
  const auto network = make_in_process_transports(3, 0);
  Subgroup group(*network[0], {0, 1}, Group::kPipeline);
  group.abort("the group's reason");
  test::expect_error(
      [&] {
        try {
          network[2]->receive(1, {}, kLong);
        } catch (const Aborted& aborted) {
          fail(aborted.what());
        }
      },
      {"rank 2 stopped", "the group's reason"});
}

// Two replicas of three ranks are in one process. The test checks the sender and receiver of each message.
TEST(World, InProcessReplicasReachTheRightRanks) {
  std::vector<World> worlds = make_in_process_worlds(2, 3, 0);
  ASSERT_EQ(worlds.size(), 2U);
  for (int replica = 0; replica < 2; ++replica) {
    const World& world = worlds[replica];
    EXPECT_EQ(world.replica, replica);
    EXPECT_TRUE(world.all_local);
    EXPECT_EQ(world.process(), replica);
    EXPECT_EQ(world.process_count(), 2);
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(world.pipeline[rank]->rank(), rank);
      EXPECT_EQ(world.pipeline[rank]->size(), 3);
      EXPECT_EQ(world.data[rank]->rank(), replica);
      EXPECT_EQ(world.data[rank]->size(), 2);
    }
  }
  // Every message has the same tag, and each arrives at its own place.
  for (int replica = 0; replica < 2; ++replica) {
    for (int rank = 0; rank < 3; ++rank) {
      worlds[replica].pipeline[rank]->isend((rank + 1) % 3, {}, {at::full({1}, 10.0 * replica + rank)});
      worlds[replica].data[rank]->isend(1 - replica, {}, {at::full({1}, 100.0 + 10.0 * replica + rank)});
    }
  }
  for (int replica = 0; replica < 2; ++replica) {
    for (int rank = 0; rank < 3; ++rank) {
      const int before = (rank + 2) % 3;
      EXPECT_EQ(first_of(worlds[replica].pipeline[rank]->receive(before, {}, kLong)), 10 * replica + before);
      EXPECT_EQ(first_of(worlds[replica].data[rank]->receive(1 - replica, {}, kLong)), 100 + 10 * (1 - replica) + rank);
    }
  }
  worlds[1].data[2]->abort("one place failed");
  EXPECT_THROW(worlds[0].processes->receive(1, {}, kLong), Aborted);
  EXPECT_THROW(worlds[0].pipeline[0]->receive(1, {}, kLong), Aborted);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
