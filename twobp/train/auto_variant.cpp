#include "twobp/train/auto_variant.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/pipeline/memory/byte_cap.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/profile/profile.h"
#include "twobp/pipeline/stage.h"
#include "twobp/plan/auto_schedule/auto_schedule.h"
#include "twobp/schedule/simulate/in_process.h"

namespace twobp {
namespace {

std::string describe(const AutoSchedule& found) {
  std::string text = concat("auto (", found.method == "named" ? found.best_named : found.method);
  if (found.named_seconds > 0 && found.method != "named") {
    text += concat(", predicted ", fixed(found.gain(), 3), "x over ", found.best_named);
  }
  return concat(text, ", at most ", fixed(100 * found.gap(), 1), "% above the best possible)");
}

// The named schedule whose memory with p2 off sets the cap of "auto".
const char* standard_name(const Pipeline& pipeline) {
  const Placement placement = possible_placements(pipeline.stages(), pipeline.ranks()).at(0);
  return placement == Placement::kLinear ? "1f1b" : placement == Placement::kV ? "zb-v" : "looped-bfs";
}

}  // namespace

Variant auto_variant(const Pipeline& pipeline, int micro_batches, Variant asked, const std::vector<double>& batch) {
  const StepOptions given{asked.batching, asked.memory_cap};
  const StepPlan standard = pipeline.plan(standard_name(pipeline), micro_batches, P2Policy::kOff, given);
  const SimulationOptions options = in_process_simulation(standard.caps);
  const std::vector<StageCost> costs = profiled_costs(pipeline.layer_costs(), batch);
  AutoScheduleOptions search{.slices = pipeline.slices()};
  if (asked.memory_cap.is_automatic()) {
    // The cap is raised to the memory that the named schedule needs under the same cap if it fills its waits with W.
    const StepPlan filled = pipeline.plan(standard_name(pipeline), micro_batches, P2Policy::kFill, given);
    const Simulation simulation = simulate(filled.schedule, costs, options);
    for (size_t rank = 0; rank < simulation.ranks.size(); ++rank)
      search.most_bytes.push_back(std::max(options.cap_per_rank.at(rank), simulation.ranks[rank].peak_bytes));
  }
  AutoSchedule found;
  try {
    found = auto_schedule(pipeline.rank_of_stage(), micro_batches, costs, options, search);
  } catch (const Error& error) {
    fail("pipeline.schedule 'auto' under pipeline.memory_cap: ", error.what());
  }
  // A source has no messages; `make` adds them. Placed W is part of the source, whatever policy placed it.
  const bool fills = fills_waits(found.schedule, costs, options);
  Schedule schedule = std::move(found.schedule);
  for (auto& list : schedule.ranks) {
    std::erase_if(list, [](const Instruction& instruction) { return !is_compute(instruction.op); });
  }
  const bool off = schedule.policy == P2Policy::kOff;
  asked.policy = off ? P2Policy::kOff : fills ? P2Policy::kFill : P2Policy::kPlaced;
  schedule.policy = asked.policy;
  schedule.name = describe(found);
  asked.schedule = ScheduleSource(std::move(schedule));
  asked.standard_peaks = standard.options.standard_peaks;  // it runs under the cap it was found for
  return asked;
}

}  // namespace twobp
