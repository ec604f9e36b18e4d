// Tests sends that wait for their receive, and the memory that messages need at the receiver.
#include "twobp/schedule/check/rendezvous.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include <gtest/gtest.h>

#include "tests/schedule/named.h"
#include "tests/schedule/support.h"
#include "twobp/schedule/check/buffering.h"
#include "twobp/schedule/check/validate.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/passes.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp::TWOBP_FILE {
namespace {

constexpr ValidateOptions kRendezvous{Sends::kRendezvous};

std::string rejection(const Schedule& schedule, const ValidateOptions& options) {
  return error_of([&] { validate(schedule, options); });
}

std::vector<Instruction> compute_of(const std::vector<Instruction>& list) {
  std::vector<Instruction> compute;
  for (const Instruction& range : list) {
    for (int i = 0; i < range.count && is_compute(range.op); ++i) {
      compute.push_back({range.op, range.stage, range.micro_batch + i});
    }
  }
  return compute;
}

TEST(Rendezvous, OneForwardOneBackwardBlocksAsGenerated) {
  const Schedule schedule = make_schedule("1f1b", 2, 2, P2Policy::kOff);
  const std::string error = rejection(schedule, kRendezvous);
  // Rank 0 sends its second micro-batch while rank 1 sends the first one's gradient.
  expect_contains(error, {"deadlock", "rank 0 at 0SEND_F1 waits for rank 1", "rank 1 at 1SEND_B0 waits for rank 0",
                          "order_for_rendezvous"});
  EXPECT_TRUE(marked_cell(error) == "0SEND_F1" || marked_cell(error) == "1SEND_B0") << error;
}

// Messages are received in another order than they are sent. Buffers hold them, but blocking sends never meet.
TEST(Rendezvous, MessagesInAnotherOrderNeverMeet) {
  Schedule schedule = empty_schedule({0, 1}, 2);
  schedule.allow_reorder = true;
  schedule.ranks[0] = {{Op::kForward, 0, 0}, {Op::kForward, 0, 1}, {Op::kSendForward, 0, 0}, {Op::kSendForward, 0, 1}};
  schedule.ranks[1] = {{Op::kRecvForward, 1, 1}, {Op::kRecvForward, 1, 0}, {Op::kForward, 1, 0}, {Op::kForward, 1, 1}};
  EXPECT_EQ(rejection(schedule, {}), "");
  expect_contains(rejection(schedule, kRendezvous), {"deadlock", "0SEND_F0"});
}

// The test lists the named schedules that do not block as generated, for N = 4 and M = 8.
TEST(Rendezvous, OnlyNaiveAndGpipeDoNotBlock) {
  std::set<std::string> free;
  for (const auto& named : named_schedules()) {
    const Schedule schedule =
        make_schedule(named.name, 4 * usual_stages_per_rank(named.placement), 8, P2Policy::kOff, 4);
    if (rejection(schedule, kRendezvous).empty()) free.emplace(named.name);
  }
  EXPECT_EQ(free, (std::set<std::string>{"naive", "gpipe"}));
}

// Calls `check` for random named schedules at random sizes.
void for_random_schedules(int rounds, const std::function<void(const Schedule&, Random&)>& check) {
  Random random(9);
  for (int round = 0; round < rounds && !testing::Test::HasFailure(); ++round) {
    const Schedule schedule = random_named_schedule(random, 5, 12);
    SCOPED_TRACE(testing::Message() << schedule.name << " N=" << schedule.rank_count()
                                    << " M=" << schedule.micro_batches << ' ' << policy_name(schedule.policy));
    check(schedule, random);
  }
}

TEST(Rendezvous, OrderedSchedulesNeverBlockAndLoseNoTime) {
  for_random_schedules(300, [](const Schedule& schedule, Random&) {
    const Schedule ordered = order_for_rendezvous(schedule);
    EXPECT_EQ(rejection(ordered, kRendezvous), "");
    const std::vector<StageCost> costs(schedule.stages);
    EXPECT_EQ(simulate(ordered, costs).step_seconds, simulate(schedule, costs).step_seconds);
    for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
      EXPECT_EQ(compute_of(ordered.ranks[rank]), compute_of(schedule.ranks[rank]));
    }
  });
}

TEST(Rendezvous, OrdersSchedulesOnAnyPlacement) {
  Random random(10);
  for (int round = 0; round < 200; ++round) {
    const Schedule schedule = add_communication(
        random_schedule(random, random_int(random, 1, 5), random_int(random, 1, 5), random_int(random, 1, 4), true));
    EXPECT_EQ(rejection(order_for_rendezvous(schedule), kRendezvous), "") << "round " << round;
  }
}

// Tries all orders in which ranks can take turns, and finds the most messages that wait for each rank.
class EveryOrder {
 public:
  explicit EveryOrder(const Schedule& schedule) : schedule_(schedule), most_(schedule.ranks.size(), 0) {
    visit(std::vector<size_t>(schedule.ranks.size(), 0));
  }
  const std::vector<int>& most() const { return most_; }

 private:
  void visit(const std::vector<size_t>& at) {
    if (!seen_.insert(at).second) return;
    std::set<std::tuple<Op, int, int>> sent;
    std::map<int, int> waiting;
    for (size_t rank = 0; rank < at.size(); ++rank) {
      for (size_t i = 0; i < at[rank]; ++i) {
        const Instruction& instruction = schedule_.ranks[rank][i];
        const auto [op, s, m, count] = instruction;
        if (op == Op::kSendForward) sent.emplace(Op::kRecvForward, s + 1, m);
        if (op == Op::kSendBackward) sent.emplace(Op::kRecvBackward, s - 1, m);
        if (is_receive(op)) --waiting[static_cast<int>(rank)];
      }
    }
    for (const auto& [op, s, m] : sent) ++waiting[schedule_.rank_of_stage[s]];
    for (size_t rank = 0; rank < at.size(); ++rank) {
      most_[rank] = std::max(most_[rank], waiting[static_cast<int>(rank)]);
      if (at[rank] == schedule_.ranks[rank].size()) continue;
      const Instruction& next = schedule_.ranks[rank][at[rank]];
      if (is_receive(next.op) && sent.count({next.op, next.stage, next.micro_batch}) == 0) continue;
      auto then = at;
      ++then[rank];
      visit(then);
    }
  }

  const Schedule& schedule_;
  std::vector<int> most_;
  std::set<std::vector<size_t>> seen_;
};

TEST(Buffering, MostMessagesAgreeWithEveryPossibleOrder) {
  for (const auto* name : {"naive", "gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-v"}) {
    const NamedSchedule& named = named_schedule(name);
    const int ranks = 2;
    const Schedule schedule =
        make_schedule(name, ranks * usual_stages_per_rank(named.placement), 3, P2Policy::kOff, ranks);
    const auto most = most_buffered(schedule);
    const EveryOrder every(schedule);
    for (int rank = 0; rank < ranks; ++rank) EXPECT_EQ(most[rank].messages, every.most()[rank]) << name << rank;
  }
  const Schedule three = make_schedule("1f1b", 3, 3, P2Policy::kOff);
  const EveryOrder every(three);
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(most_buffered(three)[rank].messages, every.most()[rank]);
}

// Rank 0 sends two F in a row, but only after a B from rank 1 has arrived.
TEST(Buffering, SendersGoOnWhenTheirMessageComes) {
  Schedule schedule;
  schedule.name = "by hand";
  schedule.stages = 2;
  schedule.micro_batches = 3;
  schedule.rank_of_stage = {0, 1};
  const Op f = Op::kForward, b = Op::kBackward;
  schedule.ranks = {{{f, 0, 0}, {b, 0, 0}, {f, 0, 1}, {f, 0, 2}, {b, 0, 1}, {b, 0, 2}},
                    {{f, 1, 0}, {b, 1, 0}, {f, 1, 1}, {b, 1, 1}, {f, 1, 2}, {b, 1, 2}}};
  EXPECT_EQ(most_buffered(add_communication(schedule))[1].messages, 2);
}

TEST(Buffering, LimitNamesTheRankAndTheReceive) {
  const Schedule gpipe = make_schedule("gpipe", 2, 5, P2Policy::kOff);
  EXPECT_EQ(most_buffered(gpipe)[1].messages, 5);  // rank 0 may finish all F before rank 1 begins
  ValidateOptions options;
  options.buffer_limit = 5;
  EXPECT_EQ(rejection(gpipe, options), "");
  options.buffer_limit = 4;
  const std::string error = rejection(gpipe, options);
  expect_contains(error, {"rank 0 may have 5 messages waiting", "0RECV_B0", "the limit is 4"});
  EXPECT_EQ(marked_cell(error), "0RECV_B0");
  options.buffer_limit = 0;
  expect_contains(rejection(make_schedule("naive", 2, 1, P2Policy::kOff), options),
                  {"1 messages waiting", "the limit is 0"});
  EXPECT_EQ(rejection(gpipe, ValidateOptions{}), "") << "no limit";
  options.buffer_limit = 4;
  // 1F1B holds the sender back. Two messages wait at every receive, and the error names the first.
  EXPECT_EQ(most_buffered(make_schedule("1f1b", 2, 5, P2Policy::kOff))[1].messages, 2);
  EXPECT_EQ(most_buffered(make_schedule("1f1b", 2, 5, P2Policy::kOff))[1].index, 0);
  EXPECT_EQ(rejection(make_schedule("1f1b", 2, 5, P2Policy::kOff), options), "");
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
