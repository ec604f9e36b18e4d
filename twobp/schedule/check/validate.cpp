// Two passes, each linear in the instructions. The first checks every rank's list on its own (order,
// completeness, inputs), the second all ranks side by side (deadlock).
#include "twobp/schedule/check/validate.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/schedule/check/walk.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp {
namespace {

constexpr size_t kMostUnmarkedCells = 2000;  // a bigger grid without a mark helps nobody

class Validator {
 public:
  explicit Validator(const Schedule& schedule) : schedule_(schedule) {}

  void run() {
    check_placement();
    TWOBP_CHECK(schedule_.slices >= 1 && schedule_.micro_batches % schedule_.slices == 0, "schedule '", schedule_.name,
                "' has ", schedule_.micro_batches, " slices, which is not a multiple of its ", schedule_.slices,
                " slices per micro-batch");
    const auto stages = static_cast<size_t>(schedule_.stages);
    done_.assign(stages * schedule_.micro_batches, 0);
    next_forward_.assign(stages, 0);
    next_p1_.assign(stages, 0);
    next_p2_.assign(stages, 0);
    for (rank_ = 0; rank_ < schedule_.rank_count(); ++rank_) {
      const auto& list = schedule_.ranks[rank_];
      for (index_ = 0; index_ < static_cast<int>(list.size()); ++index_) check_instruction(list[index_]);
    }
    check_complete();
    check_deadlock();
  }

 private:
  static uint8_t bit(Op op) { return static_cast<uint8_t>(1U << static_cast<unsigned>(op)); }

  uint8_t& done(int stage, int m) { return done_[static_cast<size_t>(stage) * schedule_.micro_batches + m]; }
  bool has(Op op, int stage, int m) { return (done(stage, m) & bit(op)) != 0; }
  bool has_backward(int stage, int m) { return has(Op::kBackwardP1, stage, m) || has(Op::kBackward, stage, m); }
  bool same_rank(int a, int b) const { return schedule_.rank_of_stage[a] == schedule_.rank_of_stage[b]; }

  template <typename... Args>
  [[noreturn]] void reject_at(int rank, int index, const Args&... what) const {
    std::string grid;
    size_t cells = 0;
    for (const auto& list : schedule_.ranks) cells += list.size();
    if (index >= 0 || cells <= kMostUnmarkedCells) {
      grid = concat('\n', draw_instructions(schedule_, index >= 0 ? rank : -1, index));
    }
    throw InvalidSchedule(concat("schedule '", schedule_.name, "' with ", schedule_.stages, " stages and ",
                                 schedule_.count_text(), " is not valid: ", concat(what...), grid),
                          index >= 0 ? rank : -1, index);
  }
  // Rejects at the current instruction.
  template <typename... Args>
  [[noreturn]] void reject(const Args&... what) const {
    reject_at(rank_, index_, "rank ", rank_, ", instruction ", index_, ": ", concat(what...));
  }

  void check_placement() const {
    TWOBP_CHECK(schedule_.stages >= 1 && schedule_.micro_batches >= 1, "schedule '", schedule_.name,
                "' needs at least one stage and one micro-batch, has ", schedule_.stages, " and ",
                schedule_.micro_batches);
    TWOBP_CHECK(static_cast<int>(schedule_.rank_of_stage.size()) == schedule_.stages, "schedule '", schedule_.name,
                "' has ", schedule_.stages, " stages but rank_of_stage places ", schedule_.rank_of_stage.size());
    for (int stage = 0; stage < schedule_.stages; ++stage) {
      const int rank = schedule_.rank_of_stage[stage];
      TWOBP_CHECK(rank >= 0 && rank < schedule_.rank_count(), "schedule '", schedule_.name, "' places stage ", stage,
                  " on rank ", rank, ", but there are ", schedule_.rank_count(), " ranks");
    }
  }

  void check_instruction(const Instruction& instruction) {
    const auto text = [&] { return to_string(instruction, schedule_.slices); };
    const int stage = instruction.stage;
    if (stage < 0 || stage >= schedule_.stages) {
      reject(text(), " names stage ", stage, ", there are ", schedule_.stages);
    }
    if (schedule_.rank_of_stage[stage] != rank_) {
      reject(text(), " belongs to rank ", schedule_.rank_of_stage[stage], ", where stage ", stage, " is placed");
    }
    if (instruction.micro_batch < 0 || instruction.count < 1 ||
        instruction.micro_batch > schedule_.micro_batches - instruction.count) {
      reject(text(), " names micro-batches outside 0 to ", schedule_.micro_batches - 1);
    }
    for (int i = 0; i < instruction.count; ++i) {
      const int m = instruction.micro_batch + i;
      if (has(instruction.op, stage, m)) reject(cell(instruction.op, stage, m), " appears twice");
      if (is_compute(instruction.op)) {
        check_compute(instruction.op, stage, m);
      } else {
        check_message(instruction.op, stage, m);
      }
      done(stage, m) |= bit(instruction.op);
    }
  }

  std::string cell(Op op, int stage, int m) const { return to_string({op, stage, m}, schedule_.slices); }

  // `next` is the place of the micro-batch that the stage must run now, if it runs its micro-batches in
  // order.
  void check_order(std::vector<int>& next, Op part, Op op, int stage, int m) {
    const int place = next[stage];
    const int due = part == Op::kForward ? place : schedule_.backward_order(place);
    const bool sliced = schedule_.slices > 1;  // slices depend on each other
    if (m != due && (sliced || !schedule_.allow_reorder)) {
      reject(cell(op, stage, m), " comes where ", cell(part, stage, due), " is due: a stage runs its ", op_name(part),
             " in micro-batch order, ",
             !sliced ? "so that gradients are bitwise equal across schedules; set allow_reorder to give that up"
             : part == Op::kForward ? "and the slices of each first to last"
                                    : "and the slices of each last to first");
    }
    ++next[stage];
  }

  void check_compute(Op op, int stage, int m) {
    if (op == Op::kForward) {
      check_order(next_forward_, op, op, stage, m);
      if (!schedule_.is_first(stage)) check_input(op, stage, m, stage - 1, Op::kRecvForward, Op::kForward);
      return;
    }
    has_any_backward_ = true;
    if (stage < schedule_.frozen) reject(cell(op, stage, m), ": stage ", stage, " is frozen, so it has F alone");
    if (op == Op::kBackwardP2) {
      if (has(Op::kBackward, stage, m)) {
        reject(cell(op, stage, m), " runs again what ", cell(Op::kBackward, stage, m), " has done");
      }
      if (!has(Op::kBackwardP1, stage, m)) {
        reject(cell(op, stage, m), " comes without ", cell(Op::kBackwardP1, stage, m), " before it");
      }
      check_order(next_p2_, op, op, stage, m);
      return;
    }
    if (has_backward(stage, m)) {
      const Op other = op == Op::kBackward ? Op::kBackwardP1 : Op::kBackward;
      reject(cell(op, stage, m), " runs again what ", cell(other, stage, m), " has done");
    }
    if (!has(Op::kForward, stage, m)) {
      reject(cell(op, stage, m), " comes without ", cell(Op::kForward, stage, m), " before it");
    }
    check_order(next_p1_, op, op, stage, m);
    if (op == Op::kBackward) check_order(next_p2_, Op::kBackwardP2, op, stage, m);
    if (!schedule_.is_last(stage)) {
      check_input(op, stage, m, stage + 1, Op::kRecvBackward, Op::kBackwardP1);
    }
  }

  // Checks that the input has come from `from`: by `receive` from another rank, or handed over on this rank.
  void check_input(Op op, int stage, int m, int from, Op receive, Op producer) {
    if (!same_rank(stage, from)) {
      if (!has(receive, stage, m)) {
        reject(cell(op, stage, m), " has no input: ", cell(receive, stage, m), " does not come before it");
      }
    } else if (producer == Op::kForward ? !has(Op::kForward, from, m) : !has_backward(from, m)) {
      reject(cell(op, stage, m), " has no input: ", cell(producer, from, m),
             " on the same rank does not come before it");
    }
  }

  void check_message(Op op, int stage, int m) {
    const bool previous = op == Op::kRecvForward || op == Op::kSendBackward;
    const int neighbour = previous ? stage - 1 : stage + 1;
    if (previous ? schedule_.is_first(stage) : schedule_.is_last(stage)) {
      reject(cell(op, stage, m), ": stage ", stage, " is the ", previous ? "first" : "last");
    }
    const bool backward = op == Op::kSendBackward || op == Op::kRecvBackward;
    if (backward && !schedule_.gives_gradient(std::max(stage, neighbour))) {
      reject(cell(op, stage, m), ": stage ", std::min(stage, neighbour), " is frozen, so it needs no gradient");
    }
    if (same_rank(stage, neighbour)) {
      reject(cell(op, stage, m), ": stage ", neighbour, " is on the same rank, which needs no message");
    }
    if (op == Op::kSendForward && !has(Op::kForward, stage, m)) {
      reject(cell(op, stage, m), " comes without ", cell(Op::kForward, stage, m), " before it");
    }
    if (op == Op::kSendBackward && !has_backward(stage, m)) {
      reject(cell(op, stage, m), " comes without ", cell(Op::kBackwardP1, stage, m), " before it");
    }
  }

  // Rejects with the first instruction of `op` on (stage, m) marked. If there is none, the stage's last
  // instruction is marked.
  template <typename... Args>
  [[noreturn]] void reject_op(Op op, int stage, int m, const Args&... what) const {
    const int rank = schedule_.rank_of_stage[stage];
    const auto& list = schedule_.ranks[rank];
    int index = static_cast<int>(list.size()) - 1;
    for (int i = 0; i < static_cast<int>(list.size()); ++i) {
      if (list[i].stage != stage) continue;
      index = i;
      if (list[i].op == op && m >= list[i].micro_batch && m - list[i].micro_batch < list[i].count) break;
    }
    reject_at(rank, index, "rank ", rank, ": ", concat(what...));
  }

  void check_complete() {
    for (int stage = 0; stage < schedule_.stages; ++stage) {
      for (int m = 0; m < schedule_.micro_batches; ++m) {
        if (!has(Op::kForward, stage, m)) {
          reject_op(Op::kRecvForward, stage, m, cell(Op::kForward, stage, m), " is missing");
        }
        if (has_any_backward_ && stage >= schedule_.frozen && !has_backward(stage, m)) {
          reject_op(Op::kForward, stage, m, cell(Op::kForward, stage, m), " has no I or B");
        }
        if (has(Op::kBackwardP1, stage, m) && !has(Op::kBackwardP2, stage, m)) {
          reject_op(Op::kBackwardP1, stage, m, cell(Op::kBackwardP1, stage, m), " has no W");
        }
        check_sent(Op::kRecvForward, stage, m);
        check_sent(Op::kRecvBackward, stage, m);
      }
    }
    // All sends are received, because F and I have their inputs, and inputs from other ranks are receives.
  }

  void check_sent(Op receive, int stage, int m) {
    if (!has(receive, stage, m)) return;
    const Instruction wanted{receive, stage, m};
    const int from = sender_stage(wanted);
    if (!has(sender_op(receive), from, m)) {
      reject_op(receive, stage, m, to_string(wanted, schedule_.slices),
                " waits for a message that is never sent: ", cell(sender_op(receive), from, m), " is missing on rank ",
                schedule_.rank_of_stage[from]);
    }
  }

  void check_deadlock() const {
    const std::vector<size_t> stops = walk(schedule_, [](int, const Instruction&, int) {});
    for (int rank = 0; rank < schedule_.rank_count(); ++rank) {
      if (stops[rank] < schedule_.ranks[rank].size()) reject_deadlock(rank, stops);
    }
  }

  // Every blocked rank waits for a blocked rank, because each message has its two sides. Following these
  // leads to a circle.
  [[noreturn]] void reject_deadlock(int rank, const std::vector<size_t>& stops) const {
    const auto at = [&](int r) -> const Instruction& { return schedule_.ranks[r][stops[r]]; };
    const auto waits_for = [&](int r) { return schedule_.rank_of_stage[other_side(at(r)).stage]; };
    std::vector<bool> seen(schedule_.ranks.size(), false);
    for (; !seen[rank]; rank = waits_for(rank)) seen[rank] = true;
    std::vector<std::string> circle;
    int r = rank;
    do {
      circle.push_back(
          concat("rank ", r, " at ", to_string(at(r), schedule_.slices), " waits for rank ", waits_for(r)));
      r = waits_for(r);
    } while (r != rank && circle.size() < 8);
    reject_at(rank, static_cast<int>(stops[rank]), "deadlock: ", join(circle),
              r != rank ? ", and so on around the circle" : "", ". Move a send before a receive");
  }

  const Schedule& schedule_;
  std::vector<uint8_t> done_;  // per (stage, micro-batch), one bit for each Op
  std::vector<int> next_forward_;
  std::vector<int> next_p1_;
  std::vector<int> next_p2_;
  bool has_any_backward_ = false;
  int rank_ = 0;
  int index_ = 0;
};

}  // namespace

void validate(const Schedule& schedule) {
  Validator(schedule).run();
}

}  // namespace twobp
