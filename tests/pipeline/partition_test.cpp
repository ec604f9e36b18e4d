// The split by measured cost against all splits there are, and what a split by hand is refused for.
#include "twobp/pipeline/partition.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "tests/pipeline/support.h"

namespace twobp {
namespace {

using Split = std::vector<int>;

double slowest(const std::vector<double>& seconds, const Split& split) {
  double most = 0;
  size_t layer = 0;
  for (const int count : split) {
    double sum = 0;
    for (int i = 0; i < count; ++i) sum += seconds.at(layer++);
    most = std::max(most, sum);
  }
  return most;
}

void for_all_splits(int layers, int stages, Split& head, const std::function<void(const Split&)>& visit) {
  if (stages == 1) {
    head.push_back(layers);
    visit(head);
    head.pop_back();
    return;
  }
  for (int first = 1; first <= layers - stages + 1; ++first) {
    head.push_back(first);
    for_all_splits(layers - first, stages - 1, head, visit);
    head.pop_back();
  }
}

double best_of_all(const std::vector<double>& seconds, int stages) {
  double best = std::numeric_limits<double>::infinity();
  Split head;
  for_all_splits(static_cast<int>(seconds.size()), stages, head,
                 [&](const Split& split) { best = std::min(best, slowest(seconds, split)); });
  return best;
}

TEST(BalancedSplit, IsOptimal) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(1);
  for (int layers = 1; layers <= 9; ++layers) {
    for (int round = 0; round < 10; ++round) {
      // Whole numbers add up exactly; zeros and equal layers are among them.
      const at::Tensor costs = at::randint(0, round < 5 ? 3 : 20, {layers}, generator, at::kLong);
      std::vector<double> seconds;
      for (int i = 0; i < layers; ++i) seconds.push_back(static_cast<double>(costs[i].item<int64_t>()));
      for (int stages = 1; stages <= layers; ++stages) {
        const Split split = balanced_split(seconds, stages);
        check_split(split, layers, stages);  // every layer is in a stage, every stage has one
        EXPECT_EQ(slowest(seconds, split), best_of_all(seconds, stages))
            << ::testing::PrintToString(seconds) << " over " << stages << ": "
            << ::testing::PrintToString(split);
      }
    }
  }
}

TEST(BalancedSplit, CountsThatDoNotDivideLoseNoLayer) {
  const std::vector<double> equal(7, 1.0);
  for (int stages = 1; stages <= 7; ++stages) {
    const Split split = balanced_split(equal, stages);
    EXPECT_EQ(std::accumulate(split.begin(), split.end(), 0), 7);
    EXPECT_EQ(slowest(equal, split), (7 + stages - 1) / stages);
  }
}

// Among equals, the later stages are the lighter ones.
TEST(BalancedSplit, PutsTheRestInFront) {
  EXPECT_EQ(balanced_split({1, 1, 1, 1, 1}, 2), (Split{3, 2}));
  EXPECT_EQ(balanced_split({1, 1, 10}, 2), (Split{2, 1}));
  EXPECT_EQ(balanced_split({10, 1, 1}, 2), (Split{1, 2}));
}

TEST(BalancedSplit, RefusesMoreStagesThanLayers) {
  test::expect_contains(test::error_of([] {
                          balanced_split({1, 1, 1}, 4);
                        }),
                        {"3 layers", "4 stages", "pipeline.stages"});
  test::expect_contains(test::error_of([] { balanced_split({1}, 0); }), {"0 stages"});
  test::expect_contains(test::error_of([] { balanced_split({}, 1); }), {"0 layers"});
}

TEST(SplitByHand, HasToFit) {
  check_split({1, 2, 3}, 6, 3);
  for (const Split& split :
       {Split{1, 2}, Split{1, 2, 4}, Split{1, 5, 0}, Split{-1, 4, 3}, Split{}, Split{2, 2, 1, 1}}) {
    test::expect_contains(test::error_of([&] { check_split(split, 6, 3); }), {"pipeline.split", "6 layers"});
  }
}

TEST(Imbalance, SlowestOverMean) {
  EXPECT_EQ(imbalance({2, 2, 2}), 1);
  EXPECT_EQ(imbalance({1, 4, 1}), 2);
  EXPECT_EQ(imbalance({0, 0}), 1);
}

}  // namespace
}  // namespace twobp
