// Tests the split by measured cost against all possible splits, and the errors of a split by hand.
#include "twobp/plan/partition/partition.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "tests/schedule/support.h"
#include "twobp/schedule/named_schedules.h"

namespace twobp::TWOBP_FILE {
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
  Random random(1);
  for (int layers = 1; layers <= 9; ++layers) {
    for (int round = 0; round < 10; ++round) {
      // Whole numbers add up exactly. Zeros and equal layers are among them.
      std::vector<double> seconds;
      for (int i = 0; i < layers; ++i) seconds.push_back(random_int(random, 0, round < 5 ? 2 : 19));
      for (int stages = 1; stages <= layers; ++stages) {
        const Split split = balanced_split(seconds, stages);
        check_split(split, layers, stages);  // every layer is in a stage, and every stage has a layer
        EXPECT_EQ(slowest(seconds, split), best_of_all(seconds, stages))
            << ::testing::PrintToString(seconds) << " over " << stages << ": " << ::testing::PrintToString(split);
      }
    }
  }
}

// If several splits are equally good, the later stages are the lighter ones.
TEST(BalancedSplit, PutsTheRemainderInTheFirstStages) {
  EXPECT_EQ(balanced_split({1, 1, 1, 1, 1}, 2), (Split{3, 2}));
  EXPECT_EQ(balanced_split({1, 1, 10}, 2), (Split{2, 1}));
  EXPECT_EQ(balanced_split({10, 1, 1}, 2), (Split{1, 2}));
}

TEST(BalancedSplit, RefusesMoreStagesThanLayers) {
  expect_contains(error_of([] { balanced_split({1, 1, 1}, 4); }), {"3 layers", "4 stages", "pipeline.stages"});
  expect_contains(error_of([] { balanced_split({1}, 0); }), {"1 layers", "at least one stage"});
  expect_contains(error_of([] { balanced_split({}, 1); }), {"0 layers"});
}

// These are the loads of ranks and stages, added up layer by layer. They serve to compare splits.
struct Loads {
  double rank = 0;  // the busiest rank
  double stage = 0;
  double squares = 0;
  double bytes_over = 0;  // how far the worst rank exceeds its cap
  double bytes = 0;       // the bytes of the fullest rank
};

Loads loads_of(const std::vector<double>& seconds, const std::vector<int>& rank_of_stage, const Split& split,
               const PartitionBytes& bytes = {}) {
  std::vector<double> rank(rank_of_stage.size(), 0), held(rank_of_stage.size(), 0);
  Loads loads;
  for (size_t s = 0, layer = 0; s < split.size(); ++s) {
    double stage = 0;
    for (int i = 0; i < split[s]; ++i, ++layer) {
      stage += seconds.at(layer);
      if (bytes.caps.empty()) continue;
      held[rank_of_stage[s]] +=
          bytes.fixed[layer] + (bytes.in_flight.empty() ? 1 : bytes.in_flight[s]) * bytes.held[layer];
    }
    rank[rank_of_stage[s]] += stage;
    loads.stage = std::max(loads.stage, stage);
    loads.squares += stage * stage;
  }
  loads.rank = *std::max_element(rank.begin(), rank.end());
  loads.bytes = *std::max_element(held.begin(), held.end());
  for (size_t r = 0; r < bytes.caps.size(); ++r) {
    loads.bytes_over = std::max(loads.bytes_over, held[r] - bytes.caps[r]);
  }
  return loads;
}

bool better(const Loads& a, const Loads& b, bool squares) {
  if (a.rank != b.rank) return a.rank < b.rank;
  if (a.stage != b.stage) return a.stage < b.stage;
  return squares && a.squares < b.squares;
}

std::vector<double> random_layers(Random& random, int layers, int most) {
  std::vector<double> seconds;
  for (int i = 0; i < layers; ++i) seconds.push_back(random_int(random, 0, most));
  return seconds;
}

PartitionBytes random_bytes(Random& random, int layers, int stages, int ranks) {
  PartitionBytes bytes;
  bytes.fixed = random_layers(random, layers, 9);
  bytes.held = random_layers(random, layers, 9);
  for (int s = 0; s < stages; ++s) bytes.in_flight.push_back(random_int(random, 1, 4));
  bytes.caps.assign(ranks, random_int(random, 1, 30 * layers / ranks));
  return bytes;
}

TEST(BalancedSplit, IsOptimalForAV) {
  Random random(2);
  for (int ranks = 1; ranks <= 4; ++ranks) {
    const auto placement = place_stages(Placement::kV, 2 * ranks, ranks);
    for (int layers = 2 * ranks; layers <= 11; ++layers) {
      for (int round = 0; round < 12; ++round) {
        const auto seconds = random_layers(random, layers, round < 4 ? 2 : 30);
        const Split split = balanced_split(seconds, placement);
        check_split(split, layers, 2 * ranks);
        const Loads found = loads_of(seconds, placement, split);
        Split head;
        for_all_splits(layers, 2 * ranks, head, [&](const Split& other) {
          EXPECT_FALSE(better(loads_of(seconds, placement, other), found, /*squares=*/true))
              << ::testing::PrintToString(seconds) << ": " << ::testing::PrintToString(other) << " is better than "
              << ::testing::PrintToString(split);
        });
      }
    }
  }
}

// The split that is found is the best one within the caps. If none is found, none exists; the cap in the message is
// enough, and one byte less is not.
void expect_best_within_caps(Placement kind, int stages, int ranks, int layers, Random& random, int& refused) {
  const auto placement = place_stages(kind, stages, ranks);
  const auto seconds = random_layers(random, layers, 30);
  PartitionBytes bytes = random_bytes(random, layers, stages, ranks);
  Loads best;
  best.rank = std::numeric_limits<double>::infinity();
  double smallest = std::numeric_limits<double>::infinity();
  Split head;
  for_all_splits(layers, stages, head, [&](const Split& other) {
    const Loads loads = loads_of(seconds, placement, other, bytes);
    smallest = std::min(smallest, loads.bytes);
    if (loads.bytes_over <= 0 && better(loads, best, /*squares=*/false)) best = loads;
  });
  if (std::isinf(best.rank)) {
    ++refused;
    const std::string error = error_of([&] { balanced_split(seconds, placement, bytes); });
    expect_contains(error, {"smallest cap", concat("(", static_cast<long>(smallest), " bytes)")});
    bytes.caps.assign(ranks, smallest);
    EXPECT_LE(loads_of(seconds, placement, balanced_split(seconds, placement, bytes), bytes).bytes, smallest);
    return;
  }
  const Loads found = loads_of(seconds, placement, balanced_split(seconds, placement, bytes), bytes);
  EXPECT_LE(found.bytes_over, 0);
  EXPECT_EQ(found.rank, best.rank);
  EXPECT_EQ(found.stage, best.stage);  // with one stage per rank, this is the same number
}

TEST(BalancedSplit, KeepsCaps) {
  Random random(3);
  int refused = 0;
  int rounds = 0;
  for (int ranks = 1; ranks <= 4; ++ranks) {
    for (int layers = 2 * ranks; layers <= 9; ++layers) {
      for (int round = 0; round < 8; ++round, rounds += 2) {
        expect_best_within_caps(Placement::kV, 2 * ranks, ranks, layers, random, refused);
        expect_best_within_caps(Placement::kLinear, ranks, ranks, layers, random, refused);
      }
    }
  }
  EXPECT_GT(refused, rounds / 10);
  EXPECT_LT(refused, 9 * rounds / 10);
}

// Rank 0 of this V has room for two layers, so rank 1 takes the three in the middle. The split with the least bytes on
// the fullest rank has three layers on rank 0. It is faster.
TEST(BalancedSplit, KeepsCapsThatDiffer) {
  PartitionBytes bytes{.fixed = {1, 1, 2, 1, 1}, .held = std::vector<double>(5, 0), .in_flight = {}, .caps = {2, 4}};
  EXPECT_EQ(balanced_split({1, 1, 5, 2, 1}, {0, 1, 1, 0}, bytes), (Split{1, 2, 1, 1}));
  bytes.caps = {2, 3};
  expect_contains(error_of([&] {
                    balanced_split({1, 1, 5, 2, 1}, {0, 1, 1, 0}, bytes);
                  }),
                  {"smallest cap", "(3 bytes)"});
}

// Four layers make four stages in one way. It needs 2 bytes on each rank.
TEST(BalancedSplit, KeepsTheCapsOfALoop) {
  const std::vector<double> ones(4, 1);
  PartitionBytes bytes{.fixed = ones, .held = std::vector<double>(4, 0), .in_flight = {}, .caps = {2, 2}};
  EXPECT_EQ(balanced_split(ones, {0, 1, 0, 1}, bytes), Split(4, 1));
  bytes.caps = {2, 1};
  expect_contains(error_of([&] { balanced_split(ones, {0, 1, 0, 1}, bytes); }), {"smallest cap", "(2 bytes)"});
}

// The test compares the local search with all splits. In nearly all cases its busiest rank has the least possible load.
// It is never above that of the split by the slowest stage.
TEST(BalancedSplit, IsNearlyAlwaysOptimalForALoop) {
  Random random(4);
  int optimal = 0;
  int cases = 0;
  for (const auto& [stages, ranks] : std::vector<std::pair<int, int>>{{4, 2}, {6, 2}, {6, 3}, {4, 1}}) {
    const auto placement = place_stages(Placement::kLooped, stages, ranks);
    for (int layers = stages; layers <= 12; ++layers) {
      for (int round = 0; round < 8; ++round, ++cases) {
        const auto seconds = random_layers(random, layers, 30);
        const Split split = balanced_split(seconds, placement);
        check_split(split, layers, stages);
        const double found = loads_of(seconds, placement, split).rank;
        EXPECT_LE(found, loads_of(seconds, placement, balanced_split(seconds, stages)).rank);
        double best = std::numeric_limits<double>::infinity();
        Split head;
        for_all_splits(layers, stages, head,
                       [&](const Split& other) { best = std::min(best, loads_of(seconds, placement, other).rank); });
        optimal += found == best ? 1 : 0;
      }
    }
  }
  EXPECT_GE(optimal, cases * 98 / 100) << optimal << " of " << cases;
}

// Ranks 0 and 2 have 10 of the 26 seconds. Only both neighbours of the second stage together can give it a layer: with
// one of them alone, the other rank still has 10, and the stages differ more. Nobody can do better than 9.
TEST(BalancedSplit, MovesTwoCutsAtOnce) {
  const std::vector<double> seconds = {1, 1, 5, 1, 1, 8, 1, 8}, none(8, 0);
  const PartitionBytes bytes{.fixed = none, .held = none, .in_flight = {}, .caps = {1, 1, 1}};
  const auto placement = place_stages(Placement::kLooped, 6, 3);
  EXPECT_EQ(balanced_split(seconds, placement, bytes), (Split{1, 3, 1, 1, 1, 1}));
}

// The test compares with all splits. No split that is fast enough has less memory on its fullest rank.
TEST(BalancedLightSplit, NeedsTheLeastMemoryOfTheFastEnough) {
  Random random(6);
  int lighter = 0;  // than the fastest split
  for (int stages = 2; stages <= 4; ++stages) {
    const auto placement = place_stages(Placement::kLinear, stages, stages);
    for (int layers = stages; layers <= 11; ++layers) {
      for (int round = 0; round < 12; ++round) {
        const auto seconds = random_layers(random, layers, 30);
        const PartitionBytes bytes = random_bytes(random, layers, stages, stages);
        const double slack = 0.05 * round;
        const Loads fastest = loads_of(seconds, placement, balanced_split(seconds, placement), bytes);
        double least = std::numeric_limits<double>::infinity();
        Split head;
        for_all_splits(layers, stages, head, [&](const Split& other) {
          const Loads loads = loads_of(seconds, placement, other, bytes);
          if (loads.rank <= fastest.rank * (1 + slack)) least = std::min(least, loads.bytes);
        });
        const Split split = balanced_light_split(seconds, bytes, slack);
        check_split(split, layers, stages);
        const Loads found = loads_of(seconds, placement, split, bytes);
        EXPECT_LE(found.rank, fastest.rank * (1 + slack));
        EXPECT_EQ(found.bytes, least) << ::testing::PrintToString(split);
        lighter += found.bytes < fastest.bytes ? 1 : 0;
      }
    }
  }
  EXPECT_GT(lighter, 20);
}

// There are nine equal units on two ranks. The first rank holds two micro-batches, the second one holds one.
TEST(BalancedLightSplit, PutsTheRemainderWhereLessIsHeld) {
  const PartitionBytes bytes{
      .fixed = std::vector<double>(9, 1), .held = std::vector<double>(9, 1), .in_flight = {2, 1}, .caps = {}};
  const std::vector<double> seconds = {1.01, 1, 1, 1, 1, 1, 1, 1, 1.02};
  EXPECT_EQ(balanced_split(seconds, 2), (Split{5, 4}));
  EXPECT_EQ(balanced_light_split(seconds, bytes, 0.02), (Split{4, 5}));
}

TEST(BalancedSplit, GivesEqualStagesToAVOfEqualLayers) {
  const auto placement = place_stages(Placement::kV, 8, 4);
  EXPECT_EQ(balanced_split(std::vector<double>(16, 1.0), placement), Split(8, 2));
  EXPECT_EQ(balanced_split(std::vector<double>(16, 1.0), place_stages(Placement::kLooped, 8, 4)), Split(8, 2));
}

// The model has a realistic size.
TEST(BalancedSplit, IsCloseToEvenForBigModels) {
  Random random(5);
  std::vector<double> seconds = {0.5};
  for (int block = 0; block < 99; ++block) {
    seconds.push_back(1 + 0.01 * random_int(random, 0, 9));
    seconds.push_back(2 + 0.01 * random_int(random, 0, 9));
  }
  seconds.push_back(9);
  const double total = std::accumulate(seconds.begin(), seconds.end(), 0.0);
  for (const int ranks : {2, 5, 16, 64}) {
    for (const Placement kind : {Placement::kV, Placement::kLooped}) {
      const auto placement = place_stages(kind, 2 * ranks, ranks);
      const Split split = balanced_split(seconds, placement);
      check_split(split, static_cast<int>(seconds.size()), 2 * ranks);
      const double busiest = loads_of(seconds, placement, split).rank;
      EXPECT_GE(busiest, total / ranks * (1 - 1e-9));
      EXPECT_LE(busiest, std::max(9.0 + 1, total / ranks) + 2.1) << ranks << " ranks";
    }
  }
}

TEST(BalancedSplit, RejectsBadBytes) {
  const PartitionBytes good = {.fixed = {1, 1}, .held = {1, 1}, .in_flight = {1, 1}, .caps = {9, 9}};
  const auto error = [&](const std::function<void(PartitionBytes&)>& change) {
    PartitionBytes bytes = good;
    change(bytes);
    return error_of([&] { balanced_split({1, 1}, {0, 1}, bytes); });
  };
  EXPECT_EQ(error([](PartitionBytes&) {}), "");
  EXPECT_EQ(error([](PartitionBytes& bytes) { bytes.in_flight = {0, 1}; }), "");
  expect_contains(error([](PartitionBytes& bytes) { bytes.in_flight = {-1, 1}; }), {"in_flight has -1"});
  expect_contains(error([](PartitionBytes& bytes) { bytes.in_flight = {1}; }), {"1 numbers", "one for each stage"});
  expect_contains(error([](PartitionBytes& bytes) { bytes.fixed = {1}; }), {"1 fixed bytes"});
  expect_contains(error([](PartitionBytes& bytes) { bytes.held = {1, -1}; }), {"layer 1 has -1 held bytes"});
  expect_contains(error([](PartitionBytes& bytes) { bytes.caps = {9}; }), {"1 caps", "one for each rank"});
  expect_contains(error([](PartitionBytes& bytes) { bytes.caps = {9, 0}; }), {"cap is 0 bytes"});
}

TEST(BalancedSplit, RejectsBadInput) {
  const std::vector<double> seconds = {1, 2, 3, 4};
  expect_contains(error_of([&] { balanced_split(seconds, std::vector<int>{0, 2, 0}); }), {"no stage on rank 1"});
  expect_contains(error_of([&] { balanced_split(seconds, std::vector<int>{0, -1}); }), {"rank -1"});
  expect_contains(error_of([&] { balanced_split({1, -2, 3}, 2); }), {"layer 1", "-2", "not negative"});
  expect_contains(error_of([&] { balanced_split({1, NAN, 3}, 2); }), {"layer 1", "finite"});
  const PartitionBytes light{.fixed = {1, 1}, .held = {1, 1}, .in_flight = {}, .caps = {}};
  expect_contains(error_of([&] { lightest_split(light, {}); }), {"2 layers", "at least one stage"});
}

// For a cap, the search for a loop gives up balance. The first layer is as heavy as ten others.
TEST(BalancedSplit, KeepsCapsOfALoop) {
  PartitionBytes bytes;
  bytes.fixed = {10, 1, 1, 1, 1, 1, 1, 1};
  bytes.held.assign(8, 0);
  bytes.caps = {11, 100};
  const auto split = balanced_split(std::vector<double>(8, 1), {0, 1, 0, 1}, bytes);
  EXPECT_EQ(split, (Split{1, 3, 1, 3}));
}

TEST(SplitByHand, MustFit) {
  check_split({1, 2, 3}, 6, 3);
  for (const Split& split :
       {Split{1, 2}, Split{1, 2, 4}, Split{1, 5, 0}, Split{-1, 4, 3}, Split{}, Split{2, 2, 1, 1}}) {
    expect_contains(error_of([&] { check_split(split, 6, 3); }), {"pipeline.split", "6 layers"});
  }
  constexpr int kMost = std::numeric_limits<int>::max();
  expect_contains(error_of([] { check_split({kMost, kMost, 8}, 6, 3); }), {"sum to 4294967302"});
}

TEST(Imbalance, IsTheSlowestOverTheMean) {
  EXPECT_EQ(imbalance({2, 2, 2}), 1);
  EXPECT_EQ(imbalance({1, 4, 1}), 2);
  EXPECT_EQ(imbalance({0, 0}), 1);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
