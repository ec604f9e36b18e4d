#include "twobp/graph/interpreter.h"

#include <mutex>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ExpandUtils.h>

#include "twobp/core/check.h"
#include "twobp/core/random.h"
#include "twobp/graph/own_operators.h"
#include "twobp/nn/kernels/rows/operators.h"
#include "twobp/nn/thrown.h"
#include "twobp/nn/values.h"

namespace twobp::graph {
namespace {

using Slots = std::vector<c10::IValue>;

Slots& table() {
  static thread_local Slots slots;
  return slots;
}

at::Generator generator_of(uint64_t seed, at::Device device) {
  if (device.is_cpu()) return at::make_generator<at::CPUGeneratorImpl>(seed);
  at::Generator all = at::globalContext().defaultGenerator(device);
  std::unique_lock lock(all.mutex());  // another rank's attention may set its seed (fused_heads.cpp)
  at::Generator generator = all.clone();
  lock.unlock();
  generator.set_current_seed(seed);
  return generator;
}

const at::Tensor& tensor_of(const Slots& slots, int slot) {
  const c10::IValue& value = slots[static_cast<size_t>(slot)];
  TWOBP_CHECK(value.isTensor() && value.toTensor().defined(), "slot ", slot,
              " has no tensor: the operator that writes it returned none");
  return value.toTensor();
}

c10::IValue value_of_slice(const Argument& argument, const SliceCall& slice) {
  const auto number = [&](const OfPositions& one) { return one.value(slice.begin, slice.length); };
  if (!argument.value.isIntList()) return number(argument.of_positions[0]);
  c10::List<int64_t> list = argument.value.toIntList().copy();
  for (const OfPositions& one : argument.of_positions) list.set(one.index, number(one));
  return list;
}

void push(const Argument& argument, Slots& slots, Stack& stack, const Operator& op, const CallContext& call_context) {
  switch (argument.kind) {
    case Argument::Kind::kSlot: {
      c10::IValue& slot = slots[static_cast<size_t>(argument.slot)];
      if (argument.last) {
        stack.push_back(std::move(slot));
        slot = c10::IValue();
      } else {
        stack.push_back(slot);
      }
      return;
    }
    case Argument::Kind::kValue:
      stack.push_back(argument.value);
      if (call_context.slice && !argument.of_positions.empty())
        stack.back() = value_of_slice(argument, *call_context.slice);
      return;
    case Argument::Kind::kTensors: {
      c10::List<at::Tensor> list;
      list.reserve(argument.slots.size());
      for (const int slot : argument.slots) list.push_back(tensor_of(slots, slot));
      stack.emplace_back(std::move(list));
      return;
    }
    case Argument::Kind::kMaybeTensors: {
      c10::List<std::optional<at::Tensor>> list;
      list.reserve(argument.slots.size());
      for (const int slot : argument.slots)
        list.push_back(slot < 0 ? std::nullopt : std::optional<at::Tensor>(tensor_of(slots, slot)));
      stack.emplace_back(std::move(list));
      return;
    }
    case Argument::Kind::kRandom: {
      const uint64_t seed = mix_bits(call_context.random, static_cast<uint64_t>(argument.slot));
      if (op.own != nullptr) {
        stack.emplace_back(static_cast<int64_t>(seed));
      } else {
        stack.emplace_back(generator_of(seed, call_context.device));
      }
      return;
    }
    case Argument::Kind::kDevice:
      stack.emplace_back(call_context.device);
      return;
  }
}

// Whether `other`, an argument beside `target`, leaves the size, the dtype and the order in memory of the result those
// of `target`.
bool follows(const c10::IValue& other, const at::Tensor& target, bool mask) {
  if (!other.isTensor()) return true;
  const at::Tensor& tensor = other.toTensor();
  if (!tensor.defined()) return false;
  const bool dtype = tensor.scalar_type() == target.scalar_type() || (mask && tensor.scalar_type() == at::kBool) ||
                     (tensor.dim() == 0 && target.dim() > 0 && !tensor.is_complex());
  if (!dtype) return false;
  if (tensor.sizes() == target.sizes()) return mask || tensor.strides() == target.strides();
  return tensor.numel() < target.numel() && tensor.dim() <= target.dim() && target.is_contiguous() &&
         at::is_expandable_to(tensor.sizes(), target.sizes());
}

// Whether the result of the call on the stack may take the memory of argument `over`, because nobody else holds it and
// the numbers stay the same.
bool may_overwrite(const Instruction& one, const Stack& stack) {
  const size_t first = stack.size() - one.arguments.size();
  const c10::IValue& value = stack[first + static_cast<size_t>(one.over)];
  if (!value.isTensor()) return false;
  const at::Tensor& target = value.toTensor();
  if (!exclusively_owned(target) || !target.is_floating_point() || !target.is_non_overlapping_and_dense()) return false;
  for (size_t i = 0; i < one.arguments.size(); ++i) {
    if (i == static_cast<size_t>(one.over)) continue;
    if (!follows(stack[first + i], target, one.op->masks)) return false;
    const bool smaller =
        one.over == 1 && stack[first + i].isTensor() && stack[first + i].toTensor().sizes() != target.sizes();
    if (smaller) return false;  // the first argument decides the order in memory
  }
  return true;
}

void call(const Instruction& one, Slots& slots, Stack& stack, const CallContext& call_context) {
  const Operator& op = *one.op;
  for (const Argument& argument : one.arguments) push(argument, slots, stack, op, call_context);
  if (call_context.slice && op.of_slice != nullptr) {
    SliceCall slice = *call_context.slice;
    const auto number = static_cast<size_t>(one.attention);
    slice.saved = one.attention < 0 ? nullptr : &slice.saved->child(call_context.attentions + number);
    op.of_slice(stack, slice);
  } else if (one.over >= 0 && may_overwrite(one, stack)) {
    if (one.over == 1) std::swap(stack[0], stack[1]);
    if (op.in_place == Operator::InPlace::kOut) stack.push_back(stack[0]);
    op.over->callBoxed(stack);
  } else {
    op.call(stack);
  }
  if (one.list) {
    TWOBP_CHECK(stack.size() == 1 && stack[0].isTensorList(), "returned no list, but graph.json expects one");
    const std::vector<at::Tensor> list = stack[0].toTensorVector();
    TWOBP_CHECK(list.size() == one.out.size(), "gave ", list.size(), " tensors, but graph.json expects ",
                one.out.size());
    for (size_t i = 0; i < list.size(); ++i) {
      if (one.out[i] >= 0) slots[static_cast<size_t>(one.out[i])] = list[i];
    }
  } else {
    TWOBP_CHECK(stack.size() == one.out.size(), "gave ", stack.size(), " results, but graph.json expects ",
                one.out.size());
    for (size_t i = 0; i < one.out.size(); ++i) {
      if (one.out[i] >= 0) slots[static_cast<size_t>(one.out[i])] = std::move(stack[i]);
    }
  }
  stack.clear();
}

at::Tensor take(const Argument& argument, Slots& slots) {
  at::Tensor tensor = tensor_of(slots, argument.slot);
  if (argument.last) slots[static_cast<size_t>(argument.slot)] = c10::IValue();
  return tensor;
}

void add_product(Parameter& parameter, const at::Tensor& a, const at::Tensor& b) {
  const std::vector<int64_t>& sizes = parameter.sizes();
  TWOBP_CHECK(sizes.size() == 2 && a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0) && a.size(0) == sizes[0] &&
                  b.size(1) == sizes[1],
              "the product of ", a.sizes(), " and ", b.sizes(), " does not fit ", parameter.name(), ", ",
              at::IntArrayRef(sizes));
  TWOBP_CHECK(a.scalar_type() == parameter.value.scalar_type() && b.scalar_type() == a.scalar_type(),
              "the product for ", parameter.name(), " is of ", a.scalar_type(), " and ", b.scalar_type(),
              ", but the parameter is ", parameter.value.scalar_type());
  parameter.accumulate_product(a, b);
}

void add_sum(Parameter& parameter, const at::Tensor& gradient) {
  TWOBP_CHECK(gradient.sizes() == at::IntArrayRef(parameter.sizes()) && gradient.is_floating_point(),
              "the gradient is ", gradient.sizes(), " ", gradient.scalar_type(), ", but that of ", parameter.name(),
              " must be floating-point numbers of sizes ", at::IntArrayRef(parameter.sizes()));
  parameter.accumulate(gradient);
}

void add_embedding(Parameter& parameter, const at::Tensor& dy, const at::Tensor& ids, int64_t padding) {
  const std::vector<int64_t>& sizes = parameter.sizes();
  TWOBP_CHECK(sizes.size() == 2 && dy.dim() >= 1 && dy.size(-1) == sizes[1] &&
                  dy.scalar_type() == parameter.value.scalar_type() && at::isIntegralType(ids.scalar_type(), false),
              "the gradient ", dy.sizes(), " of rows ", ids.sizes(), " does not fit ", parameter.name(), ", ",
              at::IntArrayRef(sizes));
  const at::Tensor flat = ids.reshape({-1});
  at::Tensor rows = dy.reshape({-1, sizes[1]});
  if (rows.size(0) != flat.size(0)) {  // the same rows for every sample
    TWOBP_CHECK(rows.size(0) > 0 && flat.size(0) % rows.size(0) == 0, "the gradient has ", rows.size(0), " rows for ",
                flat.size(0), " ids");
    rows = rows.repeat({flat.size(0) / rows.size(0), 1});
  }
  if (padding >= 0) rows = rows.masked_fill(flat.eq(padding).unsqueeze(1), 0);
  parameter.accumulate_rows(flat, rows);
}

// The step's first contribution zeroes the gradient, unless another use of a tied weight has the whole of it.
void add_nothing(Parameter& parameter) {
  const std::vector<int64_t>& sizes = parameter.sizes();
  if (sizes.size() != 2) {
    parameter.grad_to_add();
    return;
  }
  const at::Device where = parameter.value.device();
  parameter.accumulate_rows(at::empty({0}, at::TensorOptions(where).dtype(at::kLong)),
                            at::empty({0, sizes[1]}, at::TensorOptions(where).dtype(parameter.master.scalar_type())));
}

void add_gradient(const Instruction& one, Slots& slots, const CallContext& call_context) {
  Parameter& parameter = *call_context.parameters[static_cast<size_t>(one.parameter)];
  if (one.kind == Instruction::Kind::kNothing) return add_nothing(parameter);
  const at::Tensor first = take(one.arguments[0], slots);
  switch (one.kind) {
    case Instruction::Kind::kProduct:
      return add_product(parameter, first, take(one.arguments[1], slots));
    case Instruction::Kind::kGroups: {
      const at::Tensor second = take(one.arguments[1], slots);
      return add_group_products(parameter, first, second, take(one.arguments[2], slots));
    }
    case Instruction::Kind::kEmbedding:
      return add_embedding(parameter, first, take(one.arguments[1], slots), one.arguments[2].value.toInt());
    default:
      return add_sum(parameter, first);
  }
}

}  // namespace

Frame::Frame(int slots) : slots_(table()), count_(static_cast<size_t>(slots)) {
  if (slots_.size() < count_) slots_.resize(count_);
}

Frame::~Frame() {
  for (size_t i = 0; i < count_; ++i) {
    if (!slots_[i].isNone()) slots_[i] = c10::IValue();
  }
}

void Frame::put(int slot, at::Tensor tensor) {
  slots_[static_cast<size_t>(slot)] = std::move(tensor);
}

const at::Tensor& Frame::tensor(int slot) const {
  return tensor_of(slots_, slot);
}

void run(const Code& code, Frame& frame, const CallContext& call_context) {
  static thread_local Stack stack;
  stack.clear();
  Slots& slots = frame.slots();
  const Instruction* current = nullptr;
  try {
    for (const Instruction& one : code) {
      current = &one;
      if (one.kind == Instruction::Kind::kCall) {
        call(one, slots, stack, call_context);
      } else {
        add_gradient(one, slots, call_context);
      }
      for (const int slot : one.unread) slots[static_cast<size_t>(slot)] = c10::IValue();
    }
  } catch (...) {
    stack.clear();
    fail(current->place, ": ", message_of_thrown());
  }
}

}  // namespace twobp::graph
