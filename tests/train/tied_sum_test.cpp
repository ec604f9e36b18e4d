// Tests the sum of a tied weight's gradients over ranks that are processes: its pieces, its order and its errors.
#include "twobp/train/update/tied_sum.h"

#include <cmath>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include "tests/expect_error.h"
#include "tests/transport/counted.h"
#include "twobp/transport/threads/in_process.h"

namespace twobp::TWOBP_FILE {
namespace {

constexpr int64_t kRows = 5, kColumns = 6;
constexpr int64_t kPieceBytes = 7 * 4;  // 5 pieces, the last one shorter

// A weight whose uses are on these ranks, as each rank sees it.
struct Uses {
  Uses(const std::vector<int>& rank_of_use, int ranks) {
    at::manual_seed(1);
    for (size_t use = 0; use < rank_of_use.size(); ++use) {
      parameters.push_back(std::make_unique<Parameter>("table", at::zeros({kRows, kColumns})));
      parameters[use]->allocate_value(0);
      parameters[use]->allocate_grad();
      gradients.push_back(at::randn({kRows, kColumns}) * std::pow(100, use));
      parameters[use]->accumulate(gradients[use]);
    }
    for (int rank = 0; rank < ranks; ++rank) {
      UsedWeight& weight = on_rank.emplace_back();
      for (size_t use = 0; use < rank_of_use.size(); ++use) {
        const bool here = rank_of_use[use] == rank;
        const auto number = static_cast<int>(use);
        weight.uses.push_back({here ? parameters[use].get() : nullptr, number, number, rank_of_use[use]});
      }
    }
    for (auto& end : make_in_process_transports(ranks, 0))
      ends.push_back(std::make_unique<test::Counted>(std::move(end)));
  }
  std::unique_ptr<TiedSum> sum(int rank) {
    return std::make_unique<TiedSum>(on_rank[rank], TiedSum::Options{.ranks = *ends[rank], .piece_bytes = kPieceBytes});
  }
  int sent(int rank) { return test::sum_of(ends[rank]->sent()); }

  std::vector<std::unique_ptr<Parameter>> parameters;
  std::vector<at::Tensor> gradients;
  std::vector<UsedWeight> on_rank;
  std::vector<std::unique_ptr<test::Counted>> ends;
};

// The order shows in the bits.
TEST(TiedSum, AddsTheUsesInTheOrderOfTheModel) {
  Uses uses({0, 2, 1, 0, 2}, 3);
  at::Tensor expected = uses.gradients[0].clone();
  for (size_t use = 1; use < 5; ++use) expected.add_(uses.gradients[use]);
  std::vector<std::unique_ptr<TiedSum>> sums;
  for (int rank = 0; rank < 3; ++rank) sums.push_back(uses.sum(rank));
  for (int round = 0; round < 20; ++round) {
    for (const auto& sum : sums) sum->ready();
  }
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_TRUE(sums[rank]->ready());
    EXPECT_TRUE(uses.on_rank[rank].on(rank)->grad.equal(expected)) << rank;
  }
  for (const size_t other : {3, 4}) EXPECT_FALSE(uses.parameters[other]->has_grad());
  for (const size_t first : {0, 1, 2}) EXPECT_TRUE(uses.parameters[first]->has_grad());
}

TEST(TiedSum, KeepsFewPiecesOnTheWay) {
  Uses uses({0, 1}, 2);
  const auto other = uses.sum(1);
  EXPECT_EQ(other->pieces(), 5);
  EXPECT_EQ(uses.sent(1), 2);
  EXPECT_FALSE(other->ready());
  EXPECT_EQ(uses.sent(1), 0) << "no sum has come back";
  const auto first = uses.sum(0);
  EXPECT_EQ(uses.sent(0), 0);
  const std::vector<std::pair<int, int>> rounds = {{2, 2}, {2, 1}, {1, 0}};
  for (const auto& [sums, pieces] : rounds) {
    const bool last = pieces == 0;
    EXPECT_EQ(first->ready(), last);
    EXPECT_EQ(uses.sent(0), sums);
    EXPECT_EQ(other->ready(), last);
    EXPECT_EQ(uses.sent(1), pieces);
  }
}

TEST(TiedSum, NamesTheRankThatSendsNothing) {
  Uses uses({0, 1}, 2);
  const auto first = uses.sum(0);
  EXPECT_FALSE(first->ready());
  test::expect_error([&] { first->fail(3); }, {"rank 0", "waited 3 s", "from rank 1", "a weight that stages share"});
  const auto other = uses.sum(1);
  EXPECT_FALSE(other->ready());
  test::expect_error([&] { other->fail(3); }, {"rank 1", "waited 3 s", "from rank 0", "a weight that stages share"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
