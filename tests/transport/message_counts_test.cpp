// Counts the messages of small sums and broadcasts among many ranks, and looks for the rank that errors name.
#include <exception>
#include <mutex>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include "tests/transport/counted.h"
#include "twobp/core/check.h"
#include "twobp/transport/collectives.h"
#include "twobp/transport/threads/in_process.h"

namespace twobp::TWOBP_FILE {
namespace {

constexpr double kLong = 60;  // seconds

// Runs `body` on every rank but `missing`. Returns the messages that each rank has sent, and in `error` the first one.
template <typename Body>
std::vector<int> sent_by(int ranks, const Body& body, int missing = -1, std::string* error = nullptr) {
  auto ends = make_in_process_transports(ranks, 0);
  std::vector<int> sent(ranks);
  std::vector<std::thread> threads;
  std::mutex mutex;
  for (int rank = 0; rank < ranks; ++rank) {
    if (rank == missing) continue;
    threads.emplace_back([&, rank] {
      test::Counted transport(std::move(ends[rank]));
      try {
        body(transport);
      } catch (const Aborted&) {
      } catch (const std::exception& e) {
        const std::lock_guard lock(mutex);
        if (error == nullptr) {
          ADD_FAILURE() << e.what();
        } else if (error->empty()) {
          *error = e.what();
        }
        transport.abort(e.what());
      }
      sent[rank] = test::sum_of(transport.sent());
    });
  }
  for (std::thread& thread : threads) thread.join();
  return sent;
}

// Numbers of very unequal sizes, so that the order of a sum shows in its bits.
at::Tensor numbers_of(int rank) {
  return at::tensor({1e8F / static_cast<float>(rank + 1), 1.0F + static_cast<float>(rank), -1e-3F}) *
         (rank % 2 == 0 ? 1 : -1);
}

TEST(MessageCounts, ASmallSumTakesThreeMessagesARankAndHasTheBitsOfRankOrder) {
  for (const int ranks : {2, 3, 4, 5, 6, 7, 8, 13, 33, 64, 200}) {
    at::Tensor expected = numbers_of(0);
    for (int rank = 1; rank < ranks; ++rank) expected = expected + numbers_of(rank);
    const std::vector<int> sent = sent_by(ranks, [&](Transport& transport) {
      for (int repeat = 0; repeat < 3; ++repeat) {  // sums of one number after each other are not mixed up
        at::Tensor tensor = numbers_of(transport.rank());
        all_reduce_sum(transport, tensor, kLong);
        EXPECT_TRUE(at::equal(tensor, expected)) << ranks << " ranks, rank " << transport.rank();
      }
    });
    int all = 0;
    for (const int one : sent) {
      EXPECT_LE(one, 3 * 3) << ranks << " ranks";
      all += one;
    }
    EXPECT_EQ(all, 3 * (ranks > 4 ? 2 * (ranks - 1) : ranks * (ranks - 1))) << ranks << " ranks";
  }
}

// What a step needs: the norm, whose tree has the first ranks inside, and the end of the step, whose tree has the last.
TEST(MessageCounts, TwoExchangesTakeFourMessagesARank) {
  for (const int ranks : {2, 3, 5, 8, 64, 512}) {
    std::vector<int> order = {0};
    for (int rank = ranks - 1; rank > 0; --rank) order.push_back(rank);
    const std::vector<int> sent = sent_by(ranks, [&](Transport& transport) {
      const int rank = transport.rank();
      at::Tensor own = at::zeros({ranks}, at::kDouble);
      own[rank] = 0.1 * (rank + 1);
      sum_on_the_way(transport, own, kLong, WaitCause::kNorm);
      for (const int other : {0, ranks / 2, ranks - 1}) EXPECT_EQ(own[other].item<double>(), 0.1 * (other + 1));
      const at::Tensor count = at::ones({1}, at::kDouble);
      const Values notes = {at::full({rank % 3}, rank, at::kDouble), at::full({1}, rank % 256, at::kByte)};
      Exchange exchange(transport, count, 0, WaitCause::kMessage, Exchange::Adds::kOnTheWay, notes, order);
      wait_for(exchange, kLong);
      EXPECT_EQ(count.item<double>(), ranks);
      ASSERT_EQ(exchange.notes().size(), rank == 0 ? static_cast<size_t>(ranks) : 0U);
      for (size_t from = 0; from < exchange.notes().size(); ++from) {
        const auto number = static_cast<int>(from);
        EXPECT_TRUE(at::equal(exchange.notes()[from].at(0), at::full({number % 3}, number, at::kDouble)));
        EXPECT_EQ(exchange.notes()[from].at(1).item<int>(), number % 256);
      }
    });
    int all = 0;
    for (const int one : sent) {
      EXPECT_LE(one, 4) << ranks << " ranks";
      all += one;
    }
    EXPECT_EQ(all, 4 * (ranks - 1)) << ranks << " ranks";
  }
}

TEST(MessageCounts, ABarrierTakesThreeMessagesARank) {
  for (const int ranks : {2, 7, 64}) {
    for (const int one : sent_by(ranks, [](Transport& transport) { barrier(transport, kLong); })) EXPECT_LE(one, 3);
  }
}

TEST(MessageCounts, ABroadcastTakesTwoMessagesARank) {
  for (const int ranks : {2, 5, 8, 64}) {
    const int root = ranks / 3;
    const std::vector<int> sent = sent_by(ranks, [&](Transport& transport) {
      at::Tensor tensor = transport.rank() == root ? at::arange(5) : at::Tensor();
      broadcast(transport, tensor, root, kLong);
      EXPECT_TRUE(at::equal(tensor, at::arange(5)));
    });
    for (const int one : sent) EXPECT_LE(one, 2) << ranks << " ranks";
  }
}

// Nearly all ranks wait for ranks that wait themselves.
TEST(MessageCounts, TheErrorNamesTheMissingRank) {
  constexpr int kRanks = 13;
  for (int missing = 0; missing < kRanks; ++missing) {
    std::string error;
    sent_by(
        kRanks,
        [](Transport& transport) {
          at::Tensor tensor = at::ones({2});
          all_reduce_sum(transport, tensor, 0.05);
        },
        missing, &error);
    EXPECT_NE(error.find("from rank " + std::to_string(missing) + ":"), std::string::npos) << missing << ": " << error;
    error.clear();
    sent_by(
        kRanks, [](Transport& transport) { barrier(transport, 0.05); }, missing, &error);
    EXPECT_NE(error.find("from rank " + std::to_string(missing) + ":"), std::string::npos) << missing << ": " << error;
  }
}

// In a tree, too, ranks that disagree say so.
TEST(MessageCounts, TheErrorSaysThatRanksDisagree) {
  for (const bool in_order : {false, true}) {
    std::string error;
    sent_by(
        6,
        [&](Transport& transport) {
          const at::Tensor tensor = at::ones({transport.rank() == 4 ? 3 : 2});
          Exchange sum(transport, tensor, 0, WaitCause::kNorm,
                       in_order ? Exchange::Adds::kInRankOrder : Exchange::Adds::kOnTheWay);
          wait_for(sum, kLong);
        },
        /*missing=*/-1, &error);
    EXPECT_NE(error.find("ranks disagree on what they sum"), std::string::npos) << error;
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
