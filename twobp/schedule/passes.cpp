// The two rewrites that make a generator's F and B ready to run. Each is one walk over each rank's list.
#include "twobp/schedule/passes.h"

#include <algorithm>
#include <utility>

#include "twobp/core/check.h"

namespace twobp {
namespace {

// The micro-batches of one stage whose W has no place yet, in the order of their I.
struct PendingW {
  std::vector<int> micro_batches;
  size_t head = 0;

  bool empty() const { return head == micro_batches.size(); }

  void add(const Instruction& p1) {
    for (int i = 0; i < p1.count; ++i) micro_batches.push_back(p1.micro_batch + i);
  }

  // Takes the longest run of consecutive micro-batches from the oldest on, at most `most`, as one W.
  Instruction take(int stage, int most) {
    Instruction w{Op::kBackwardP2, stage, micro_batches[head], 1};
    ++head;
    while (w.count < most && !empty() && micro_batches[head] == w.micro_batch + w.count) {
      ++w.count;
      ++head;
    }
    return w;
  }
};

void check_stage(const Schedule& schedule, const Instruction& instruction) {
  TWOBP_CHECK(static_cast<int>(schedule.rank_of_stage.size()) == schedule.stages, "schedule '", schedule.name, "' has ",
              schedule.stages, " stages but places ", schedule.rank_of_stage.size());
  TWOBP_CHECK(instruction.stage >= 0 && instruction.stage < schedule.stages, "schedule '", schedule.name,
              "': ", to_string(instruction), " names a stage that does not exist: there are ", schedule.stages);
}

// Merges I and W into B, the form of a schedule that does not place W.
void merge_backward(Schedule& schedule) {
  for (auto& list : schedule.ranks) {
    std::erase_if(list, [](const Instruction& i) { return i.op == Op::kBackwardP2; });
    for (Instruction& i : list) {
      if (i.op == Op::kBackwardP1) i.op = Op::kBackward;
    }
  }
}

// Splits B into I, so that dL/dx leaves at once, and W right after it.
void split_backward(Schedule& schedule) {
  for (auto& list : schedule.ranks) {
    std::vector<Instruction> split;
    split.reserve(list.size());
    for (const Instruction& i : list) {
      split.push_back(i);
      if (i.op != Op::kBackward) continue;
      split.back().op = Op::kBackwardP1;
      split.push_back({Op::kBackwardP2, i.stage, i.micro_batch, i.count});
    }
    list = std::move(split);
  }
}

}  // namespace

Schedule apply_p2_policy(Schedule schedule, P2Policy policy) {
  schedule.policy = policy;
  if (schedule.has(Op::kBackwardP2)) {
    if (policy == P2Policy::kFill) split_backward(schedule);
    if (policy == P2Policy::kPlaced || policy == P2Policy::kFill) return schedule;
    merge_backward(schedule);
  }
  TWOBP_CHECK(policy != P2Policy::kPlaced, "schedule '", schedule.name,
              "' places no W itself, so p2 'placed' has no meaning: use off, end, cooldown or fill");
  if (policy == P2Policy::kOff) return schedule;

  std::vector<PendingW> pending(schedule.stages);
  std::vector<size_t> last_forward(schedule.stages, 0);  // index in the list of the rank that has the stage
  for (auto& list : schedule.ranks) {
    for (size_t i = 0; i < list.size(); ++i) {
      check_stage(schedule, list[i]);
      if (list[i].op == Op::kForward) last_forward[list[i].stage] = i;
    }

    std::vector<Instruction> split;
    split.reserve(list.size() + (policy == P2Policy::kCooldown ? list.size() / 2 : 0) + 1);
    std::vector<int> stages;  // the stages of this rank that still have W to place
    for (size_t i = 0; i < list.size(); ++i) {
      Instruction instruction = list[i];
      if (instruction.op != Op::kBackward) {
        split.push_back(instruction);
        continue;
      }
      const int stage = instruction.stage;
      if (pending[stage].micro_batches.empty()) stages.push_back(stage);
      instruction.op = Op::kBackwardP1;
      split.push_back(instruction);
      pending[stage].add(instruction);
      if (policy == P2Policy::kCooldown && i > last_forward[stage]) {
        for (int left = instruction.count; left > 0;) {
          split.push_back(pending[stage].take(stage, left));
          left -= split.back().count;
        }
      }
    }
    // The last stage comes first, because its I ends first.
    std::sort(stages.rbegin(), stages.rend());
    for (int stage : stages) {
      while (!pending[stage].empty()) split.push_back(pending[stage].take(stage, schedule.micro_batches));
    }
    list = std::move(split);
  }
  return schedule;
}

Schedule add_communication(Schedule schedule) {
  for (auto& list : schedule.ranks) {
    std::vector<Instruction> with;
    with.reserve(3 * list.size());
    for (const Instruction& instruction : list) {
      check_stage(schedule, instruction);
      TWOBP_CHECK(is_compute(instruction.op), "schedule '", schedule.name,
                  "' has communication already: ", to_string(instruction), ". Add it once, after the other passes");
      const int stage = instruction.stage;
      const int rank = schedule.rank_of_stage[stage];
      const bool from_previous = !schedule.is_first(stage) && schedule.rank_of_stage[stage - 1] != rank;
      const bool to_next = !schedule.is_last(stage) && schedule.rank_of_stage[stage + 1] != rank;
      const auto message = [&](Op op) { with.push_back({op, stage, instruction.micro_batch, instruction.count}); };
      const bool forward = instruction.op == Op::kForward;
      const bool backward = instruction.op == Op::kBackwardP1 || instruction.op == Op::kBackward;
      if (forward && from_previous) message(Op::kRecvForward);
      if (backward && to_next) message(Op::kRecvBackward);
      with.push_back(instruction);
      if (forward && to_next) message(Op::kSendForward);
      if (backward && from_previous) message(Op::kSendBackward);
    }
    list = std::move(with);
  }
  return schedule;
}

Schedule after_frozen_stages(Schedule schedule) {
  const int frozen = schedule.rank_count();
  const int ahead = 2 * frozen * schedule.slices;
  schedule.stages += frozen;
  schedule.frozen += frozen;
  for (int rank = frozen; rank-- > 0;) schedule.rank_of_stage.insert(schedule.rank_of_stage.begin(), rank);
  for (int rank = 0; rank < frozen; ++rank) {
    std::vector<Instruction> with;
    int next = 0;
    const auto run_frozen = [&](int end) {
      for (; next < std::min(end, schedule.micro_batches); ++next) {
        if (rank > 0) with.push_back({Op::kRecvForward, rank, next});
        with.push_back({Op::kForward, rank, next});
        if (schedule.rank_of_stage[rank + 1] != rank) with.push_back({Op::kSendForward, rank, next});
      }
    };
    run_frozen(ahead);
    for (Instruction instruction : schedule.ranks[rank]) {
      instruction.stage += frozen;
      const bool forward = instruction.op == Op::kForward;
      if (forward) run_frozen(instruction.micro_batch + instruction.count + ahead);
      if (forward && instruction.stage == frozen && rank + 1 != frozen)
        with.push_back({Op::kRecvForward, frozen, instruction.micro_batch, instruction.count});
      with.push_back(instruction);
    }
    schedule.ranks[rank] = std::move(with);
  }
  return schedule;
}

Schedule keep_micro_batches(Schedule schedule, int micro_batches) {
  TWOBP_CHECK(micro_batches >= 1 && micro_batches <= schedule.micro_batches, "schedule '", schedule.name, "' is for ",
              schedule.micro_batches, " micro-batches and cannot run ", micro_batches);
  if (micro_batches == schedule.micro_batches) return schedule;
  for (auto& list : schedule.ranks) {
    std::erase_if(list, [&](const Instruction& i) { return i.micro_batch >= micro_batches; });
    for (Instruction& i : list) i.count = std::min(i.count, micro_batches - i.micro_batch);
  }
  schedule.micro_batches = micro_batches;
  return schedule;
}

}  // namespace twobp
