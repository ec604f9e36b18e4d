// Simulates the peak bytes of a model under every named schedule that it can run and every p2 policy:
//   memory_peaks COSTS RANKS...
// COSTS is a file of `twobp profile --json` with one micro-batch size. Prints a JSON array with one row for
// each schedule, number of ranks N, number of micro-batches M (N and 2N; 1 for `naive`) and policy. Each case
// is simulated with and without the byte cap `auto`, which is the need of the fullest rank with p2 off.
// Layers are assigned to stages by their measured seconds.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <set>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/plan/cost_model.h"
#include "twobp/plan/memory/stage_bytes.h"
#include "twobp/plan/partition/partition.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp {
namespace {

using Json = nlohmann::ordered_json;

constexpr P2Policy kPolicies[] = {P2Policy::kOff, P2Policy::kEnd, P2Policy::kCooldown, P2Policy::kFill,
                                  P2Policy::kPlaced};

// A schedule's stages with their ranks and costs. They are the same for every M and policy.
struct Placed {
  const NamedSchedule* schedule = nullptr;
  int ranks = 0;
  std::vector<int> split;
  std::vector<StageCost> costs;
};

// Skips presets that have another name but the same generator (1f1b-1 and 1f1b-2 are 1f1b).
std::vector<const NamedSchedule*> schedules() {
  std::vector<const NamedSchedule*> all;
  std::set<Schedule (*)(int, int, int, int)> generators;
  for (const NamedSchedule& schedule : named_schedules()) {
    if (generators.insert(schedule.generate).second) all.push_back(&schedule);
  }
  return all;
}

Json row(const Placed& placed, const Schedule& schedule, const Simulation& simulation, bool capped) {
  double held = 0, total = 0;
  Json totals = Json::array();
  for (const RankSimulation& rank : simulation.ranks) {
    held = std::max(held, rank.peak_bytes);
    total = std::max(total, rank.total_peak_bytes());
    totals.push_back(rank.total_peak_bytes());
  }
  return {{"schedule", placed.schedule->name},
          {"p2", policy_name(schedule.policy)},
          {"cap", capped ? "auto" : "none"},
          {"ranks", placed.ranks},
          {"stages", schedule.stages},
          {"micro_batches", schedule.micro_batches},
          {"held_bytes", held},    // activations, stash and messages of the fullest rank
          {"total_bytes", total},  // also parameters, gradients and optimizer state
          {"rank_total_bytes", totals},
          {"step_seconds", simulation.step_seconds},
          {"split", placed.split}};
}

void add_rows(const Placed& placed, const CostModel& model, int micro_batches, Json& rows) {
  const int stages = static_cast<int>(placed.split.size());
  SimulationOptions options = simulation_options(model);
  options.check = false;  // make_schedule has checked it
  double standard = 0;    // the need of the fullest rank with p2 off
  for (const P2Policy policy : kPolicies) {
    if (policy == P2Policy::kPlaced && !placed.schedule->places_p2) continue;
    const Schedule schedule = make_schedule(placed.schedule->name, stages, micro_batches, policy, placed.ranks);
    options.cap_per_rank.clear();
    const Simulation simulation = simulate(schedule, placed.costs, options);
    rows.push_back(row(placed, schedule, simulation, false));
    if (policy == P2Policy::kOff) {
      for (const RankSimulation& rank : simulation.ranks) {
        standard = std::max(standard, rank.total_peak_bytes());
      }
      continue;
    }
    options.cap_per_rank = caps_for(standard, schedule.rank_of_stage, placed.ranks, placed.costs);
    rows.push_back(row(placed, schedule, simulate(schedule, placed.costs, options), true));
  }
}

Json peaks(const CostModel& model, const std::vector<int>& ranks) {
  TWOBP_CHECK(model.micro_batch_sizes.size() == 1, "the costs are for ", model.micro_batch_sizes.size(),
              " micro-batch sizes: measure one");
  const int size = model.micro_batch_sizes.front();
  std::vector<double> seconds;
  for (const LayerCost& layer : layer_costs_at(model, size)) seconds.push_back(layer.seconds());
  Json rows = Json::array();
  for (const int n : ranks) {
    for (const NamedSchedule* schedule : schedules()) {
      const int stages = n * usual_stages_per_rank(schedule->placement);
      Placed placed{schedule, n, balanced_split(seconds, place_stages(schedule->placement, stages, n)), {}};
      placed.costs = stage_costs(model, placed.split, size);
      const bool naive = schedule->name == "naive";  // one micro-batch at a time: M changes nothing else
      for (const int m : naive ? std::vector<int>{1} : std::vector<int>{n, 2 * n}) {
        if (admits(schedule->name, stages, n, m)) add_rows(placed, model, m, rows);
      }
    }
  }
  return rows;
}

int ranks_of(const char* text) {
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  TWOBP_CHECK(*end == '\0' && value >= 1 && value <= 1024, "'", text, "' must be a number of ranks from 1 to 1024");
  return static_cast<int>(value);
}

}  // namespace
}  // namespace twobp

int main(int argc, char** argv) {
  try {
    TWOBP_CHECK(argc >= 3, "usage: memory_peaks COSTS RANKS...");
    std::vector<int> ranks;
    for (int i = 2; i < argc; ++i) ranks.push_back(twobp::ranks_of(argv[i]));
    std::puts(twobp::peaks(twobp::read_cost_model(argv[1]), ranks).dump().c_str());
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
