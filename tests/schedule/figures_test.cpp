// Tests the table of docs/schedules.md row by row: idle time in a rank's span, and peak in flight. The units are those
// of the table: F = I = W of a rank's whole share of the model, so one of v stages takes 1 / v of it.
// Peaks are counted as the authors count them: a micro-batch of a stage is held, whole, from the start of its F to the
// end of its W. Then other properties of whole steps.
#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/schedule/named.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp::TWOBP_FILE {
namespace {

struct Row {
  std::string name;
  // The unit is the F of one stage, so this is v times the table's value.
  std::function<double(int n, int v, int m)> idle;
  // The unit is micro-batches of one stage, so this is v times the table's value.
  std::function<double(int n, int v, int m)> peak;
  int least_ranks = 1;  // with fewer, there is less idle time
};

const std::vector<Row>& rows() {
  const auto gpipe_idle = [](int n, int, int) { return 3 * (n - 1); };
  const auto third = [](int n, int, int) { return n - 1; };
  const auto none = [](int, int, int) { return 0; };
  const auto every = [](int, int v, int m) { return v * m; };
  const auto usual = [](int n, int v, int) { return v * n; };
  static const std::vector<Row> kRows = {
      {"naive", [](int n, int, int m) { return 3 * (n - 1) * m; }, [](int, int, int) { return 1; }},
      {"gpipe", gpipe_idle, every},
      {"1f1b", gpipe_idle, usual},
      {"1f1b-1", gpipe_idle, usual},
      {"1f1b-2", gpipe_idle, usual},
      {"eager-1f1b", gpipe_idle, [](int n, int, int) { return 2 * n - 1; }},
      {"interleaved-1f1b", gpipe_idle, [](int n, int v, int) { return (v + 1) * n - 1; }},
      {"looped-bfs", gpipe_idle, every},
      {"zb-h1", third, usual},
      {"zb-h2", none, [](int n, int, int) { return 2 * n - 1; }},
      {"interleaved-zb", third, usual},
      {"zb-v", none, usual},
      {"v-half", [](int n, int, int) { return 3 * n - (n % 2 == 0 ? 5 : 4); },
       [](int n, int, int) { return (n + 2) / 2 * 2; }, 3},
      {"v-min", [](int n, int, int) { return 4 * n - 5; }, [](int n, int, int) { return (n + 4) / 3 * 2; }, 3},
      {"dualpipe-v", third, [](int n, int, int) { return 2 * n + 1; }},
  };
  return kRows;
}

TEST(Figures, MatchTheTable) {
  for (const Row& row : rows()) {
    const NamedSchedule& named = named_schedule(row.name);
    // These N cover all forms of the delays of v-half and v-min: even and odd N, multiples of 3 and others.
    for (const int n : {1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 32}) {
      if (n < row.least_ranks) continue;
      for (const int m : {2 * n, 2 * n + 3, 4 * n}) {
        for (int v = 1; v <= 4; ++v) {
          if (named.placement != Placement::kLooped && v != usual_stages_per_rank(named.placement)) continue;
          if (row.name.starts_with("interleaved") && m % n != 0) continue;  // uneven rounds hold more
          SCOPED_TRACE(testing::Message() << row.name << " N=" << n << " v=" << v << " M=" << m);
          const Schedule schedule =
              make_schedule(row.name, v * n, m, named.places_p2 ? P2Policy::kPlaced : P2Policy::kOff, n);
          double span = 0;
          int peak = 0;
          for (const auto& rank : simulate(schedule, std::vector<StageCost>(v * n)).ranks) {
            span = std::max(span, rank.timeline.back().end - rank.timeline.front().begin);
            peak = std::max(peak, rank.peak_in_flight);
          }
          EXPECT_EQ(span - 3 * v * m, row.idle(n, v, m));
          EXPECT_EQ(peak, row.peak(n, v, m));
        }
      }
    }
  }
}

TEST(Figures, ExistForEverySchedule) {
  for (const std::string& name : schedule_names()) {
    EXPECT_TRUE(std::any_of(rows().begin(), rows().end(), [&](const Row& row) { return row.name == name; }))
        << name << " has no row in the table";
  }
}

Simulation run(const std::string& name, int stages, int ranks, int micro_batches, P2Policy policy,
               const SimulationOptions& options = {}) {
  return simulate(make_schedule(name, stages, micro_batches, policy, ranks), std::vector<StageCost>(stages), options);
}

// PyTorch and Megatron refuse rounds of unequal size. Such rounds stall, but that costs less than an idle rank up to
// the next multiple of N.
TEST(Interleaved, TakesAnyNumberOfMicroBatches) {
  for (int n = 2; n <= 8; ++n) {
    for (int v = 2; v <= 3; ++v) {
      for (int m = n; m <= 6 * n; ++m) {
        const int padded = (m + n - 1) / n * n;
        EXPECT_LE(run("interleaved-1f1b", v * n, n, m, P2Policy::kOff).step_seconds, 3 * v * padded + 3 * (n - 1))
            << n << ' ' << v << ' ' << m;
      }
    }
  }
}

// This is the purpose of the schedule. If messages take time, 1F1B waits for two of them in each round, and this
// schedule waits for none.
TEST(Eager, HidesMessages) {
  SimulationOptions slow;
  slow.message_seconds = 1;
  const int n = 4;
  const int m = 32;
  const double eager = run("eager-1f1b", n, n, m, P2Policy::kOff, slow).step_seconds;
  EXPECT_LT(eager, 0.75 * run("1f1b", n, n, m, P2Policy::kOff, slow).step_seconds);
  EXPECT_LE(eager,
            // The start-up has additional messages, and little else is longer.
            3 * m + 3 * (n - 1) + 2 * (n - 1) + n);
}

// W in places that were chosen ahead delays a step no more than W that runs only in waits.
TEST(ZeroBubble, PlacedP2DelaysNothing) {
  for (const NamedSchedule& named : named_schedules()) {
    if (!named.places_p2) continue;
    for (int n = 1; n <= 6; ++n) {
      for (int m = 1; m <= 2 * n; ++m) {
        const int stages = n * usual_stages_per_rank(named.placement);
        if (named.name == "dualpipe-v" && m < 2 * n) continue;  // a part of that for M = 2N
        const auto step = [&](P2Policy policy) {
          return simulate(make_schedule(named.name, stages, m, policy, n), std::vector<StageCost>(stages)).step_seconds;
        };
        EXPECT_LE(step(P2Policy::kPlaced), step(P2Policy::kFill)) << named.name << ' ' << n << ' ' << m;
      }
    }
  }
}

// Of two micro-batches, the second comes back to rank 0 after 1 + 4 N, right after the first. Only then there is time
// for their two W of the first stage. All other W fit into waits.
TEST(ZeroBubble, TwoMicroBatchesOfAVWaitForNoW) {
  for (int n = 4; n <= 8; ++n) {
    const Schedule schedule = make_schedule("zb-v", 2 * n, 2, P2Policy::kPlaced);
    EXPECT_EQ(simulate(schedule, std::vector<StageCost>(2 * n)).step_seconds, 1 + 4 * n + 2) << n;
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
