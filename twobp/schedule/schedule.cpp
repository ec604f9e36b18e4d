// Names of ops and policies, and the text form of one instruction.
#include "twobp/schedule/schedule.h"

#include <algorithm>
#include <array>

#include "twobp/core/check.h"
#include "twobp/core/text.h"

namespace twobp {
namespace {

// In the order of the enumerators.
constexpr std::array<std::string_view, 8> kOpNames = {"F", "I", "W", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B"};
constexpr std::array<std::string_view, 5> kPolicyNames = {"off", "end", "cooldown", "fill", "placed"};

}  // namespace

std::string_view op_name(Op op) {
  return kOpNames.at(static_cast<size_t>(op));
}

bool is_compute(Op op) {
  return op == Op::kForward || op == Op::kBackwardP1 || op == Op::kBackwardP2 || op == Op::kBackward;
}

bool is_receive(Op op) {
  return op == Op::kRecvForward || op == Op::kRecvBackward;
}

std::string micro_batch_name(int micro_batch, int slices) {
  if (slices == 1) return std::to_string(micro_batch);
  return concat(micro_batch / slices, '.', micro_batch % slices);
}

std::string to_string(const Instruction& instruction, int slices) {
  std::string text = std::to_string(instruction.stage);
  text += op_name(instruction.op);
  text += micro_batch_name(instruction.micro_batch, slices);
  if (instruction.count != 1) {
    text += '-';
    text += micro_batch_name(instruction.micro_batch + instruction.count - 1, slices);
  }
  return text;
}

std::string_view policy_name(P2Policy policy) {
  return kPolicyNames.at(static_cast<size_t>(policy));
}

P2Policy parse_policy(std::string_view name) {
  return static_cast<P2Policy>(index_of_name("p2 policy", name, policy_names()));
}

std::vector<std::string> policy_names() {
  return {kPolicyNames.begin(), kPolicyNames.end()};
}

std::string Schedule::count_text() const {
  const std::string count = concat(micro_batches / slices, " micro-batches");
  return slices > 1 ? concat(count, " of ", slices, " slices") : count;
}

bool Schedule::has(Op op) const {
  return std::ranges::any_of(ranks, [&](const std::vector<Instruction>& list) {
    return std::ranges::any_of(list, [&](const Instruction& instruction) { return instruction.op == op; });
  });
}

std::string_view idle_cause_name(IdleCause cause) {
  constexpr std::array<std::string_view, kIdleCauses> kNames = {"start-up", "message", "nothing to fill", "experts",
                                                                "tail"};
  return kNames.at(static_cast<size_t>(cause));
}

}  // namespace twobp
