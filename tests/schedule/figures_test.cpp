// Tests the table of docs/schedules.md row by row: idle time in a rank's span, and peak in flight. The units are those
// of the table: F = I = W of a rank's whole share of the model, so one of v stages takes 1 / v of it.
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
       [](int n, int, int) { return (n + 2) / 2 * 2; }},
      {"v-min", [](int n, int, int) { return 4 * n - 5; }, [](int n, int, int) { return (n + 4) / 3 * 2; }},
      {"dualpipe-v", third, [](int n, int, int) { return 2 * n + 1; }},
  };
  return kRows;
}

TEST(Figures, MatchTheTable) {
  for (const Row& row : rows()) {
    const NamedSchedule& named = named_schedule(row.name);
    // These N cover all forms of the delays of v-half and v-min: even and odd N, multiples of 3 and others.
    for (const int n : {3, 4, 5, 6, 8, 9, 12, 16}) {
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

}  // namespace
}  // namespace twobp::TWOBP_FILE
