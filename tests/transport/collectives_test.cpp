// Tests operations of all ranks on every transport. Sums have the bits of rank order, whatever number of them runs at
// once. A wait that fails names the missing rank.
#include "twobp/transport/collectives.h"

#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>

#include <gtest/gtest.h>

#include "tests/expect_error.h"
#include "tests/transport/transports.h"
#include "twobp/core/measure.h"

namespace twobp::TWOBP_FILE {
namespace {

constexpr double kLong = 60;  // seconds
constexpr int kRanks = 3;

void sleep_for(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

class Collectives : public test::OnEveryTransport {};

// The numbers have very unequal sizes, so that the order of a sum shows in its bits.
at::Tensor contribution(int rank, int64_t count, at::ScalarType type = at::kFloat) {
  const at::Tensor i = at::arange(count, at::kDouble);
  const at::Tensor size = at::pow(10.0, at::remainder(i + 7 * rank, 9) - 4);
  return (size * (1 + at::sin(i + 31 * rank))).to(type);
}

at::Tensor sum_in_rank_order(int ranks, int64_t count, at::ScalarType type = at::kFloat) {
  at::Tensor sum = contribution(0, count, type);
  for (int r = 1; r < ranks; ++r) sum = sum + contribution(r, count, type);
  return sum;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

// Small sums are sent whole, large ones in slices. Some cannot be divided evenly by the ranks.
constexpr int64_t kCounts[] = {1, 2, 100, 4096, 4097, 5000, 100003, 1 << 20};

TEST_P(Collectives, RunsSeveralSumsAtOnce) {
  run(kRanks, [](Transport& transport) {
    std::vector<at::Tensor> tensors;
    std::vector<AllReduce> sums;
    const auto count = static_cast<int>(std::size(kCounts));
    for (int i = 0; i < count; ++i) {
      tensors.push_back(contribution(transport.rank(), kCounts[i]));
      sums.emplace_back(transport, tensors.back(), i + 1);
    }
    // Each rank polls the sums in another order, and pauses for a while.
    const double end = now_seconds() + kLong;
    for (int open = count, round = 0; open > 0 && now_seconds() < end; ++round) {
      if (round % 3 == transport.rank()) sleep_for(0.0005);
      open = 0;
      for (int i = 0; i < count; ++i) {
        AllReduce& sum = sums[transport.rank() == 1 ? count - 1 - i : i];
        if (!sum.ready()) ++open;
      }
    }
    for (int i = 0; i < count; ++i) {
      EXPECT_TRUE(sums[i].ready()) << kCounts[i];
      EXPECT_TRUE(same_bits(tensors[i], sum_in_rank_order(kRanks, kCounts[i]))) << kCounts[i];
    }
  });
}

// The ranks wait in another order than they started.
TEST_P(Collectives, WaitsInAnyOrder) {
  run(kRanks, [](Transport& transport) {
    at::Tensor small = contribution(transport.rank(), 10);
    at::Tensor large = contribution(transport.rank(), 300000);
    AllReduce of_small(transport, small, 1), of_large(transport, large, 2);
    AllReduce& first = transport.rank() == 0 ? of_small : of_large;
    AllReduce& second = transport.rank() == 0 ? of_large : of_small;
    wait_for(first, kLong);
    wait_for(second, kLong);
    EXPECT_TRUE(same_bits(small, sum_in_rank_order(kRanks, 10)));
    EXPECT_TRUE(same_bits(large, sum_in_rank_order(kRanks, 300000)));
  });
}

// Each tensor's sum is wanted on one rank. The last rank owns none, and several sums run at once.
TEST_P(Collectives, SumsAtTheOwnersAlone) {
  run(kRanks, [](Transport& transport) {
    const std::vector<int> owners = {1, 0, 1, 0};
    const std::vector<int64_t> counts = {5, 4097, 100003, 1};
    std::vector<std::vector<at::Tensor>> tensors(2);
    std::vector<ReduceScatter> sums;
    for (int i = 0; i < 2; ++i) {
      for (const int64_t count : counts) tensors[i].push_back(contribution(transport.rank() + 3 * i, count));
      sums.emplace_back(transport, tensors[i], owners, i + 1);
    }
    for (const int i : {1, 0}) {
      wait_for(sums[i], kLong);
      EXPECT_TRUE(sums[i].ready());
      for (size_t t = 0; t < counts.size(); ++t) {
        at::Tensor expected = contribution(transport.rank() + 3 * i, counts[t]);
        if (owners[t] == transport.rank()) {
          expected = contribution(3 * i, counts[t]);
          for (int r = 1; r < kRanks; ++r) expected = expected + contribution(r + 3 * i, counts[t]);
        }
        EXPECT_TRUE(same_bits(tensors[i][t], expected)) << "sum " << i << ", tensor " << t;
      }
    }
    barrier(transport, kLong);  // the owners have read the tensors
  });
}

TEST_P(Collectives, SumsOverTwoRanksAndOtherTypes) {
  run(2, [](Transport& transport) {
    for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kLong}) {
      for (const int64_t count : {int64_t{5}, int64_t{30001}}) {
        at::Tensor tensor = contribution(transport.rank(), count, type);
        all_reduce_sum(transport, tensor, kLong);
        EXPECT_TRUE(same_bits(tensor, sum_in_rank_order(2, count, type))) << toString(type) << " " << count;
      }
    }
  });
}

TEST_P(Collectives, SumsATensorWithGaps) {
  run(2, [](Transport& transport) {
    at::Tensor whole = at::zeros({20, 30});
    at::Tensor part = whole.narrow(1, 5, 10);
    part.fill_(transport.rank() + 1);
    all_reduce_sum(transport, part, kLong);
    EXPECT_EQ(whole.sum().item<double>(), 20 * 10 * 3);
    EXPECT_EQ(part.min().item<double>(), 3);
  });
}

TEST_P(Collectives, NamesADisagreement) {
  run(2, [](Transport& transport) {
    at::Tensor tensor = at::ones({transport.rank() == 0 ? 6 : 5});
    test::expect_error([&] { all_reduce_sum(transport, tensor, kLong); }, {"ranks disagree on what they sum"});
  });
}

TEST_P(Collectives, BroadcastsFromEachRank) {
  run(kRanks, [](Transport& transport) {
    for (int root = 0; root < kRanks; ++root) {
      at::Tensor tensor;
      if (transport.rank() == root) tensor = at::full({root + 1, 1000}, root, at::kInt);
      broadcast(transport, tensor, root, kLong);
      EXPECT_TRUE(at::equal(tensor, at::full({root + 1, 1000}, root, at::kInt)));
      tensor.fill_(-1);  // each rank has its own copy
    }
    at::Tensor last = transport.rank() == 0 ? at::arange(3) : at::Tensor();
    broadcast(transport, last, 0, kLong);
    EXPECT_TRUE(at::equal(last, at::arange(3)));
  });
}

TEST_P(Collectives, GathersOnEachRank) {
  run(kRanks, [](Transport& transport) {
    for (int root = 0; root < kRanks; ++root) {
      const int rank = transport.rank();
      const std::vector<Values> all = gather(transport, {at::full({rank + 1}, rank), at::full({1}, root)}, root, kLong);
      if (rank != root) {
        EXPECT_TRUE(all.empty());
        continue;
      }
      ASSERT_EQ(all.size(), static_cast<size_t>(kRanks));
      for (int from = 0; from < kRanks; ++from) {
        EXPECT_TRUE(at::equal(all[from].at(0), at::full({from + 1}, from)));
        EXPECT_EQ(all[from].at(1).item<int>(), root);
      }
    }
  });
}

// No rank leaves before the last one has arrived. All ranks are on one machine, so they have one clock.
TEST_P(Collectives, BarrierWaitsForTheLast) {
  run(kRanks, [](Transport& transport) {
    for (int last = 0; last < kRanks; ++last) {
      if (transport.rank() == last) sleep_for(0.03);
      const double came = now_seconds();
      barrier(transport, kLong);
      const at::Tensor times = at::tensor({came, now_seconds()}, at::kDouble);
      const std::vector<Values> all = gather(transport, {times}, 0, kLong);
      for (const Values& left : all) {
        EXPECT_GE(left.at(0)[1].item<double>(), all[last].at(0)[0].item<double>());
      }
    }
  });
}

// Rank 2 takes no part. A rank that waits for it says so.
TEST_P(Collectives, TimeOutsNameTheRank) {
  run(kRanks, [](Transport& transport) {
    if (transport.rank() != 0) return;
    // Earlier waits of a call use up part of its time-out. The last wait has the rest, which is less on a busy machine.
    const std::vector<std::string> parts = {"rank 0 waited 0.0", "from rank 1", "collective"};
    test::expect_error([&] { barrier(transport, 0.05); }, parts);
    test::expect_error([&] { gather(transport, {at::ones({1})}, 0, 0.05); }, parts);
    at::Tensor tensor;
    test::expect_error([&] { broadcast(transport, tensor, 1, 0.05); }, parts);
    at::Tensor large = at::ones({100000});
    test::expect_error([&] { all_reduce_sum(transport, large, 0.05); }, parts);
  });
}

INSTANTIATE_TEST_SUITE_P(Transports, Collectives, ::testing::ValuesIn(test::worlds()), test::name_of_world);

}  // namespace
}  // namespace twobp::TWOBP_FILE
