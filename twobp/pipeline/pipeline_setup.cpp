// A pipeline's schedules, together with the memory that they may use, and where W runs on devices.
#include <algorithm>

#include "twobp/core/check.h"
#include "twobp/pipeline/memory/byte_cap.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/profile/simulated_costs.h"
#include "twobp/pipeline/stage.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/simulate/in_process.h"
#include "twobp/schedule/simulate/p2_places.h"
#include "twobp/transport/collectives.h"

namespace twobp {

StepSetup Pipeline::setup(const ScheduleSource& schedule, int micro_batches, P2Policy policy,
                          P2Batching batching, MemoryCap memory_cap) const {
  if (micro_batches == 0) return forward_setup(0);
  StepSetup setup;
  setup.schedule = schedule.make(stages(), ranks(), micro_batches, policy, slices());
  setup.leading = leading_forwards(setup.schedule);
  setup.batching = batching;
  setup.memory_cap = memory_cap;
  const Schedule standard = schedule.make(stages(), ranks(), micro_batches, P2Policy::kOff, slices());
  TWOBP_CHECK(standard.has_backward(), "schedule '", schedule.name(),
              "' has no backward pass, so it trains nothing: use another schedule");
  setup.standard_peaks = standard_peaks(standard, layer_costs_);
  return setup;
}

StepSetup Pipeline::forward_setup(int micro_batches) const {
  StepSetup setup;
  setup.memory_cap = MemoryCap::none();
  if (micro_batches == 0) {  // the last batch of an epoch may leave a replica nothing
    setup.schedule.name = "none";
    setup.schedule.stages = stages();
    setup.schedule.micro_batches = 0;
    setup.schedule.rank_of_stage = rank_of_stage_;
    setup.schedule.ranks.resize(ranks());
  } else {
    setup.schedule = make_forward_schedule(rank_of_stage_, micro_batches);
  }
  setup.leading = leading_forwards(setup.schedule);
  return setup;
}

std::vector<int64_t> Pipeline::caps(const StepSetup& setup) const {
  const MemoryCap& cap = setup.memory_cap;
  if (!cap.is_automatic()) return std::vector<int64_t>(ranks(), cap.bytes());
  return auto_caps(setup.standard_peaks, fixed_bytes(), cap.times());
}

std::vector<int64_t> Pipeline::fixed_bytes() const {
  if (!known_fixed_.empty()) return known_fixed_;
  at::Tensor fixed = at::zeros({world_.replicas, ranks()}, at::kLong);
  for (const int rank : world_.local_ranks()) {
    const MemoryUse use = meter_->rank_use(rank);
    fixed[world_.replica].mutable_data_ptr<int64_t>()[rank] = use.total() - use.held();
  }
  const bool together = world_.processes->size() > 1;
  if (together) all_reduce_sum(*world_.processes, fixed, timeout_);
  // The highest of any replica, so that all plan alike: replicas may hold different shards of the optimizer.
  const at::Tensor most = std::get<0>(fixed.max(0));
  const int64_t* values = most.const_data_ptr<int64_t>();
  std::vector<int64_t> bytes(values, values + ranks());
  if (together) known_fixed_ = bytes;
  return bytes;
}

const std::vector<std::vector<int>>& Pipeline::p2_places_of(const Schedule& schedule, P2Order order) {
  auto kept = std::ranges::find_if(p2_places_, [&](const KeptPlaces& places) {
    return places.order == order && places.schedule == schedule;
  });
  if (kept == p2_places_.end()) kept = p2_places_.insert(kept, {schedule, order, {}, {}});
  if (kept->places.empty() || kept->caps != caps_) {
    SimulationOptions options = in_process_simulation(caps_);
    options.p2_order = order;
    options.data_parallel.replicas = world_.replicas;  // bucket order goes by it
    options.timeline = true;
    kept->caps = caps_;
    kept->places = p2_places(schedule, simulate(schedule, profiled_costs(layer_costs_), options));
  }
  return kept->places;
}

}  // namespace twobp
