// The paper's schedules and forward-only.
#include <algorithm>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/schedule/generators/generators.h"
#include "twobp/schedule/named_schedules.h"

namespace twobp {
namespace {

Schedule one_stage_per_rank(std::string_view name, int stages, int micro_batches, int slices) {
  TWOBP_CHECK(stages >= 1, "schedule '", name, "' needs at least 1 stage, got ", stages);
  Schedule schedule = empty_schedule(name, place_stages(Placement::kLinear, stages, stages), micro_batches, slices);
  for (auto& list : schedule.ranks) list.reserve(2 * static_cast<size_t>(schedule.micro_batches));
  return schedule;
}

// warm_up(stage) F, then B and F in turn, then the remaining B.
template <typename WarmUp>
Schedule alternating(std::string_view name, int stages, int micro_batches, int slices, WarmUp&& warm_up) {
  Schedule schedule = one_stage_per_rank(name, stages, micro_batches, slices);
  for (int stage = 0; stage < stages; ++stage) {
    auto& list = schedule.ranks[stage];
    const int ahead = std::min(warm_up(stage) + slices - 1, schedule.micro_batches);
    for (int m = 0; m < ahead; ++m) list.push_back({Op::kForward, stage, m});
    for (int m = 0; m < schedule.micro_batches; ++m) {
      list.push_back({Op::kBackward, stage, schedule.backward_order(m)});
      if (m + ahead < schedule.micro_batches) list.push_back({Op::kForward, stage, m + ahead});
    }
  }
  return schedule;
}

}  // namespace

Schedule naive(int stages, int micro_batches, int slices) {
  Schedule schedule = one_stage_per_rank("naive", stages, micro_batches, slices);
  for (int stage = 0; stage < stages; ++stage) {
    auto& list = schedule.ranks[stage];
    for (int first = 0; first < schedule.micro_batches; first += slices) {
      for (int m = first; m < first + slices; ++m) list.push_back({Op::kForward, stage, m});
      for (int m = first + slices - 1; m >= first; --m) list.push_back({Op::kBackward, stage, m});
    }
  }
  return schedule;
}

Schedule gpipe(int stages, int micro_batches, int slices) {
  Schedule schedule = one_stage_per_rank("gpipe", stages, micro_batches, slices);
  for (int stage = 0; stage < stages; ++stage) {
    auto& list = schedule.ranks[stage];
    for (int m = 0; m < schedule.micro_batches; ++m) list.push_back({Op::kForward, stage, m});
    for (int m = 0; m < schedule.micro_batches; ++m) {
      list.push_back({Op::kBackward, stage, schedule.backward_order(m)});
    }
  }
  return schedule;
}

Schedule one_forward_one_backward(int stages, int micro_batches, int slices) {
  // As many as the stages from this one on can take before the first gradient comes back.
  return alternating("1f1b", stages, micro_batches, slices, [=](int stage) { return stages - stage; });
}

Schedule eager_one_forward_one_backward(int stages, int micro_batches, int slices) {
  return alternating("eager-1f1b", stages, micro_batches, slices, [=](int stage) { return 2 * (stages - stage) - 1; });
}

Schedule forward_only(const std::vector<int>& rank_of_stage, int micro_batches) {
  Schedule schedule = empty_schedule("forward", rank_of_stage, micro_batches);
  // F of stage s and micro-batch m is at tick s + m: after its input, and in micro-batch order.
  for (int tick = 0; tick < schedule.stages + micro_batches - 1; ++tick) {
    for (int stage = std::min(tick, schedule.stages - 1); stage >= 0; --stage) {
      const int m = tick - stage;
      if (m >= micro_batches) break;
      schedule.ranks[schedule.rank_of_stage[stage]].push_back({Op::kForward, stage, m});
    }
  }
  return schedule;
}

Schedule empty_schedule(std::string_view name, std::vector<int> rank_of_stage, int micro_batches, int slices) {
  TWOBP_CHECK(!rank_of_stage.empty(), "schedule '", name, "' needs at least 1 stage, got 0");
  TWOBP_CHECK(micro_batches >= 1, "schedule '", name, "' needs at least 1 micro-batch, got ", micro_batches);
  TWOBP_CHECK(slices >= 1, "schedule '", name, "' needs at least 1 slice, got ", slices);
  Schedule schedule;
  schedule.name = name;
  schedule.stages = static_cast<int>(rank_of_stage.size());
  schedule.micro_batches = micro_batches * slices;
  schedule.slices = slices;
  schedule.ranks.resize(*std::max_element(rank_of_stage.begin(), rank_of_stage.end()) + 1);
  schedule.rank_of_stage = std::move(rank_of_stage);
  return schedule;
}

}  // namespace twobp
