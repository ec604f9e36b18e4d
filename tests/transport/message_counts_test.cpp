// Counts the messages of small sums and broadcasts among many ranks, and looks for the rank that errors name.
#include <exception>
#include <mutex>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include "twobp/core/check.h"
#include "twobp/transport/collectives.h"
#include "twobp/transport/threads/in_process.h"

namespace twobp::TWOBP_FILE {
namespace {

constexpr double kLong = 60;  // seconds

// Counts what a rank sends.
class Counted : public Transport {
 public:
  explicit Counted(Transport& to) : to_(to) {}
  int rank() const override { return to_.rank(); }
  int size() const override { return to_.size(); }
  void isend(int to, const Tag& tag, Values values) override {
    ++sent;
    to_.isend(to, tag, std::move(values));
  }
  bool try_receive(int from, const Tag& tag, Values& values) override { return to_.try_receive(from, tag, values); }
  Values receive(int from, const Tag& tag, double timeout) override { return to_.receive(from, tag, timeout); }
  void abort(const std::string& reason) override { to_.abort(reason); }

  int sent = 0;

 private:
  Transport& to_;
};

// Runs `body` on every rank but `missing`. Returns the messages that each rank has sent, and in `error` the first one.
template <typename Body>
std::vector<int> sent_by(int ranks, const Body& body, int missing = -1, std::string* error = nullptr) {
  const auto ends = make_in_process_transports(ranks, 0);
  std::vector<int> sent(ranks);
  std::vector<std::thread> threads;
  std::mutex mutex;
  for (int rank = 0; rank < ranks; ++rank) {
    if (rank == missing) continue;
    threads.emplace_back([&, rank] {
      Counted transport(*ends[rank]);
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
      sent[rank] = transport.sent;
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
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
