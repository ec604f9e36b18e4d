// The named schedules. Each generator places stage s on rank s and writes, for each rank, its F and B.
#include "twobp/schedule/generators.h"

#include <algorithm>
#include <array>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/schedule/passes.h"
#include "twobp/schedule/validate.h"

namespace twobp {
namespace {

Schedule one_stage_per_rank(std::string_view name, int stages, int micro_batches) {
  TWOBP_CHECK(stages >= 1, "schedule '", name, "' needs at least 1 stage, got ", stages);
  TWOBP_CHECK(micro_batches >= 1, "schedule '", name, "' needs at least 1 micro-batch, got ", micro_batches);
  Schedule schedule;
  schedule.name = name;
  schedule.stages = stages;
  schedule.micro_batches = micro_batches;
  schedule.rank_of_stage.resize(stages);
  for (int stage = 0; stage < stages; ++stage) schedule.rank_of_stage[stage] = stage;
  schedule.ranks.resize(stages);
  for (auto& list : schedule.ranks) list.reserve(2 * static_cast<size_t>(micro_batches));
  return schedule;
}

struct NamedSchedule {
  std::string_view name;
  Schedule (*generate)(int stages, int micro_batches);
  int micro_batches_per_stage;  // the default M is this times N; 0: 1
};

constexpr std::array<NamedSchedule, 5> kNamed = {{
    {"naive", naive, 0},
    {"gpipe", gpipe, 1},
    {"1f1b", one_forward_one_backward, 1},
    {"1f1b-1", one_forward_one_backward, 1},
    {"1f1b-2", one_forward_one_backward, 2},
}};

const NamedSchedule& find_schedule(std::string_view name) {
  for (const auto& entry : kNamed) {
    if (entry.name == name) return entry;
  }
  const auto names = schedule_names();
  fail("unknown schedule '", name, "': did you mean '", nearest(name, names), "'? There are ", join(names));
}

}  // namespace

Schedule naive(int stages, int micro_batches) {
  Schedule schedule = one_stage_per_rank("naive", stages, micro_batches);
  for (int stage = 0; stage < stages; ++stage) {
    for (int m = 0; m < micro_batches; ++m) {
      schedule.ranks[stage].push_back({Op::kForward, stage, m});
      schedule.ranks[stage].push_back({Op::kBackward, stage, m});
    }
  }
  return schedule;
}

Schedule gpipe(int stages, int micro_batches) {
  Schedule schedule = one_stage_per_rank("gpipe", stages, micro_batches);
  for (int stage = 0; stage < stages; ++stage) {
    for (Op op : {Op::kForward, Op::kBackward}) {
      for (int m = 0; m < micro_batches; ++m) schedule.ranks[stage].push_back({op, stage, m});
    }
  }
  return schedule;
}

Schedule one_forward_one_backward(int stages, int micro_batches) {
  Schedule schedule = one_stage_per_rank("1f1b", stages, micro_batches);
  for (int stage = 0; stage < stages; ++stage) {
    auto& list = schedule.ranks[stage];
    // What the stages after this one take in before the first gradient comes back.
    const int warm_up = std::min(stages - stage, micro_batches);
    for (int m = 0; m < warm_up; ++m) list.push_back({Op::kForward, stage, m});
    for (int m = 0; m < micro_batches; ++m) {
      list.push_back({Op::kBackward, stage, m});
      if (m + warm_up < micro_batches) list.push_back({Op::kForward, stage, m + warm_up});
    }
  }
  return schedule;
}

Schedule forward_only(int stages, int micro_batches) {
  Schedule schedule = one_stage_per_rank("forward", stages, micro_batches);
  for (int stage = 0; stage < stages; ++stage) {
    for (int m = 0; m < micro_batches; ++m) schedule.ranks[stage].push_back({Op::kForward, stage, m});
  }
  return schedule;
}

std::vector<std::string> schedule_names() {
  std::vector<std::string> names;
  for (const auto& entry : kNamed) names.emplace_back(entry.name);
  return names;
}

int default_micro_batches(std::string_view name, int stages) {
  TWOBP_CHECK(stages >= 1, "schedule '", name, "' needs at least 1 stage, got ", stages);
  return std::max(1, find_schedule(name).micro_batches_per_stage * stages);
}

Schedule make_schedule(std::string_view name, int stages, int micro_batches, P2Policy policy) {
  Schedule schedule = find_schedule(name).generate(stages, micro_batches);
  schedule.name = name;
  schedule = add_communication(apply_p2_policy(std::move(schedule), policy));
  validate(schedule);
  return schedule;
}

Schedule make_forward_schedule(int stages, int micro_batches) {
  Schedule schedule = add_communication(forward_only(stages, micro_batches));
  validate(schedule);
  return schedule;
}

}  // namespace twobp
