// The public functions of the simulation: checks before it, the smallest cap after it. See simulator.cpp.
#include "twobp/schedule/simulate/simulate.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <limits>
#include <sstream>
#include <string>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/schedule/check/validate.h"
#include "twobp/schedule/simulate/simulator.h"

namespace twobp {
namespace {

// A whole number, rounded up so that it is valid as a cap: "1.5 KiB (1537 bytes)".
std::string in_bytes(double bytes) {
  std::ostringstream whole;
  whole << std::fixed << std::setprecision(0) << std::ceil(bytes);
  return concat(format_bytes(bytes), " (", whole.str(), " bytes)");
}

// Whether W that is held back takes a rank over its cap. The inputs have been checked.
bool comes_over_cap(const Schedule& schedule, const std::vector<StageCost>& costs, SimulationOptions options) {
  const std::vector<double> caps = std::exchange(options.cap_per_rank, {});
  options.recorded.clear();
  options.timeline = false;
  const Simulation as_written = run_simulation(schedule, costs, options, false);
  for (size_t rank = 0; rank < caps.size(); ++rank) {
    if (caps[rank] > 0 && exceeds(as_written.ranks[rank].peak_bytes, caps[rank])) return true;
  }
  return false;
}

// fills_waits for inputs that have been checked.
bool waits_are_filled(const Schedule& schedule, const std::vector<StageCost>& costs, const SimulationOptions& options) {
  if (!schedule.holds_p2_back()) return schedule.fills();
  const auto& caps = options.cap_per_rank;
  const bool capped = std::any_of(caps.begin(), caps.end(), [](double cap) { return cap > 0; });
  return capped && comes_over_cap(schedule, costs, options);
}

}  // namespace

double Simulation::idle_fraction(int rank) const {
  return step_seconds > 0 ? (step_seconds - ranks.at(rank).busy) / step_seconds : 0;
}

double Simulation::bubble_ratio() const {
  double sum = 0;
  for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) sum += idle_fraction(rank);
  return ranks.empty() ? 0 : sum / static_cast<double>(ranks.size());
}

bool fills_waits(const Schedule& schedule, const std::vector<StageCost>& costs, const SimulationOptions& options) {
  check_simulation_inputs(schedule, costs, options);
  return waits_are_filled(schedule, costs, options);
}

Simulation simulate(const Schedule& schedule, const std::vector<StageCost>& costs, const SimulationOptions& options) {
  if (options.check) validate(schedule);
  check_simulation_inputs(schedule, costs, options);
  Simulation result = run_simulation(schedule, costs, options, waits_are_filled(schedule, costs, options));
  if (!options.reject_over_cap || options.cap_per_rank.empty()) return result;
  for (int rank = 0; rank < schedule.rank_count(); ++rank) {
    const double cap = options.cap_per_rank[rank];
    const RankSimulation& over = result.ranks[rank];
    if (cap <= 0 || !exceeds(over.peak_bytes, cap)) continue;
    const std::vector<double> smallest = smallest_caps(schedule, costs, options);
    fail("schedule '", schedule.name, "' does not fit: rank ", rank, " holds ", in_bytes(over.peak_bytes), " at ",
         to_string({over.peak.op, over.peak.stage, over.peak.micro_batch}), ", its cap is ", in_bytes(cap),
         ". The smallest cap it fits in is ", in_bytes(smallest[rank]), " on this rank and ",
         in_bytes(*std::max_element(smallest.begin(), smallest.end())), " on the fullest");
  }
  return result;
}

std::vector<double> smallest_caps(const Schedule& schedule, const std::vector<StageCost>& costs,
                                  SimulationOptions options) {
  // Under a cap that no op fits in, every W that can run before an F or I does run.
  options.cap_per_rank.assign(schedule.ranks.size(), std::numeric_limits<double>::min());
  options.recorded.clear();
  options.reject_over_cap = false;
  options.timeline = false;
  std::vector<double> caps;
  for (const RankSimulation& rank : simulate(schedule, costs, options).ranks) caps.push_back(rank.peak_bytes);
  return caps;
}

}  // namespace twobp
