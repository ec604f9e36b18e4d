#include "twobp/graph/liveness.h"

#include <algorithm>
#include <map>
#include <set>

namespace twobp::graph {
namespace {

using SlotSet = std::set<int>;

bool is_kept_elsewhere(const Input& input) {
  return input.from == Input::From::kParameter || input.from == Input::From::kConstant;
}

// Removes the instructions whose results nobody needs, and the sums into gradients of frozen parameters. Returns what
// the rest needs from outside, with `needed` itself as far as the code does not make it.
SlotSet remove_unneeded(Code& code, SlotSet needed, const std::vector<bool>& trained) {
  Code kept;
  for (auto one = code.rbegin(); one != code.rend(); ++one) {
    bool wanted = one->kind != Instruction::Kind::kCall && trained[static_cast<size_t>(one->parameter)];
    for (const int slot : one->out) wanted = needed.erase(slot) > 0 || wanted;
    if (!wanted) continue;
    for_each_read(*one, [&](int slot) { needed.insert(slot); });
    kept.push_back(std::move(*one));
  }
  std::reverse(kept.begin(), kept.end());
  code = std::move(kept);
  return needed;
}

// Whether the result can take this argument's memory.
bool could_overwrite(const Instruction& one, size_t argument) {
  const Operator::InPlace how = one.op->in_place;
  if (how == Operator::InPlace::kNever || (argument == 1 && how != Operator::InPlace::kEither)) return false;
  if (argument == 1) {  // a + alpha b is b + alpha a only for an alpha of 1
    for (size_t i = 2; i < one.arguments.size(); ++i) {
      const c10::IValue& factor = one.arguments[i].value;
      if (!(factor.isInt() && factor.toInt() == 1) && !(factor.isDouble() && factor.toDouble() == 1)) return false;
    }
  }
  return argument <= 1;
}

// Marks the last use of every value but those in `live`, which are read after the code.
void mark_last_uses(Code& code, SlotSet live) {
  for (auto one = code.rbegin(); one != code.rend(); ++one) {
    for (int& slot : one->out) {
      if (slot >= 0 && live.erase(slot) == 0) slot = -1;
    }
    std::map<int, int> reads;
    for_each_read(*one, [&](int slot) { ++reads[slot]; });
    for (auto& argument : one->arguments) {
      if (argument.kind != Argument::Kind::kSlot || live.contains(argument.slot)) continue;
      argument.last = reads.at(argument.slot) == 1;
      const auto index = static_cast<size_t>(&argument - one->arguments.data());
      if (argument.last && one->over < 0 && one->kind == Instruction::Kind::kCall && could_overwrite(*one, index))
        one->over = static_cast<int8_t>(index);
      if (argument.last) reads.erase(argument.slot);
    }
    for (const auto& [slot, count] : reads) {
      if (live.insert(slot).second) one->unread.push_back(slot);
    }
    for (const auto& argument : one->arguments) {
      if (argument.last) live.insert(argument.slot);
    }
  }
}

std::vector<Input> inputs_in(const std::vector<Input>& inputs, const SlotSet& slots) {
  std::vector<Input> read;
  std::copy_if(inputs.begin(), inputs.end(), std::back_inserter(read),
               [&](const Input& input) { return slots.contains(input.slot); });
  return read;
}

// The values of forward that are not kept for the backward pass but loaded or made again: parameters, constants, and
// views of them.
class MadeAgain {
 public:
  explicit MadeAgain(const Program& program) : program_(program) {
    for (const Input& input : program.inputs) {
      if (is_kept_elsewhere(input)) slots_.insert(input.slot);
    }
    for (const Instruction& one : program.forward) {
      bool all = one.op != nullptr && one.op->view;
      for_each_read(one, [&](int slot) { all = all && slots_.contains(slot); });
      if (!all) continue;
      slots_.insert(one.out.begin(), one.out.end());
      views_.push_back(&one);
    }
  }

  // Puts the views that are among `needed` before `code`, and returns the rest of `needed`, with the inputs that the
  // views read.
  SlotSet add_to(Code& code, SlotSet needed) const {
    Code before;
    for (auto view = views_.rbegin(); view != views_.rend(); ++view) {
      if (needed.erase((*view)->out.front()) == 0) continue;
      for_each_read(**view, [&](int slot) { needed.insert(slot); });
      before.push_back(**view);
    }
    code.insert(code.begin(), before.rbegin(), before.rend());
    return needed;
  }

  // Splits off the slots of parameters and constants, and returns them as inputs.
  std::vector<Input> take_inputs(SlotSet& needed) const {
    std::vector<Input> inputs;
    for (const Input& input : program_.inputs) {
      if (is_kept_elsewhere(input) && needed.erase(input.slot) > 0) inputs.push_back(input);
    }
    return inputs;
  }

 private:
  const Program& program_;
  SlotSet slots_;
  std::vector<const Instruction*> views_;
};

Pass pass_of(const std::vector<Input>& inputs, const Code& code, const SlotSet& wanted) {
  Pass pass;
  pass.code = code;
  pass.inputs = inputs_in(inputs, remove_unneeded(pass.code, wanted, {}));
  mark_last_uses(pass.code, wanted);
  return pass;
}

}  // namespace

Pass make_pass(const std::vector<Input>& inputs, const Code& code, const std::vector<int>& wanted) {
  return pass_of(inputs, code, {wanted.begin(), wanted.end()});
}

Plan make_plan(const Program& program, const std::vector<bool>& trained) {
  Plan plan;
  plan.program = &program;
  const MadeAgain again(program);
  SlotSet outputs;
  for (const Program::Output& output : program.outputs) outputs.insert(output.slot);
  SlotSet made_in_forward;
  for (const Input& input : program.inputs) made_in_forward.insert(input.slot);
  for (const Instruction& one : program.forward) made_in_forward.insert(one.out.begin(), one.out.end());

  // Backwards: the units, then p1 with what they need of it, then forward with what both need.
  SlotSet needed_of_p1;
  SlotSet needed_of_forward;
  for (size_t i = 0; i < program.backward_p2.size(); ++i) {
    Plan::Unit unit;
    unit.index = static_cast<int>(i);
    unit.pass.code = program.backward_p2[i].code;
    SlotSet needed = remove_unneeded(unit.pass.code, {}, trained);
    if (unit.pass.code.empty()) continue;
    needed = again.add_to(unit.pass.code, std::move(needed));
    unit.pass.inputs = again.take_inputs(needed);
    for (const int slot : needed) {
      const bool forward = made_in_forward.contains(slot);
      (forward ? unit.from_forward : unit.from_p1).push_back(slot);
      (forward ? needed_of_forward : needed_of_p1).insert(slot);
    }
    mark_last_uses(unit.pass.code, {});
    plan.units.push_back(std::move(unit));
  }

  SlotSet after_p1 = needed_of_p1;
  for (const Program::At& gradient : program.input_gradients) after_p1.insert(gradient.slot);
  plan.backward_p1.code = program.backward_p1;
  SlotSet needed = remove_unneeded(plan.backward_p1.code, after_p1, trained);
  needed = again.add_to(plan.backward_p1.code, std::move(needed));
  plan.backward_p1.inputs = again.take_inputs(needed);
  for (const Program::Output& output : program.outputs) {
    if (output.gradient >= 0) plan.gradients.push_back(needed.erase(output.gradient) > 0);
  }
  plan.until_p1.assign(needed.begin(), needed.end());
  mark_last_uses(plan.backward_p1.code, after_p1);

  SlotSet after_forward = outputs;
  SlotSet new_buffers;
  for (const Program::At& buffer : program.new_buffers) new_buffers.insert(buffer.slot);
  after_forward.insert(new_buffers.begin(), new_buffers.end());
  plan.forward_alone = pass_of(program.inputs, program.forward, after_forward);
  plan.evaluate = pass_of(program.inputs, program.evaluate, outputs);
  after_forward.insert(needed.begin(), needed.end());
  after_forward.insert(needed_of_forward.begin(), needed_of_forward.end());
  plan.forward = pass_of(program.inputs, program.forward, after_forward);
  return plan;
}

}  // namespace twobp::graph
