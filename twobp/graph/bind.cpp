#include <algorithm>

#include <ATen/core/LegacyTypeDispatch.h>

#include "twobp/core/check.h"
#include "twobp/graph/graph.h"
#include "twobp/graph/interpreter.h"
#include "twobp/graph/liveness.h"
#include "twobp/graph/read_code.h"

namespace twobp::graph {
namespace {

using Numbers = std::vector<Sizes::Number>;

void set_numbers(Argument& argument, const Numbers& numbers) {
  if (argument.of_sizes.empty()) return;
  const auto whole = [&](const OfSizes& one) { return numbers[one.entry].whole; };
  const OfSizes& first = argument.of_sizes.front();
  if (argument.value.isIntList()) {
    c10::List<int64_t> list = argument.value.toIntList().copy();
    for (const OfSizes& one : argument.of_sizes) list.set(one.index, whole(one));
    argument.value = std::move(list);
  } else if (argument.value.isDouble()) {
    argument.value = numbers[first.entry].as_real();
  } else {
    const Sizes::Number& number = numbers[first.entry];
    const at::Scalar scalar = number.real ? at::Scalar(number.value) : at::Scalar(number.whole);
    argument.value = argument.value.isTensor() ? wrapped_number(scalar) : c10::IValue(scalar);
  }
  argument.of_sizes.clear();
}

void set_numbers(Code& code, const Numbers& numbers) {
  for (Instruction& one : code) {
    for (Argument& argument : one.arguments) set_numbers(argument, numbers);
  }
}

void set_numbers(Program& program, const Numbers& numbers) {
  for (Code* code : {&program.forward, &program.evaluate, &program.backward_p1}) set_numbers(*code, numbers);
  for (Program::Unit& unit : program.backward_p2) set_numbers(unit.code, numbers);
}

at::Tensor computed(const Table& table, const Tensors& constants) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Pass pass = make_pass(table.inputs, table.code, {table.slot});
  Frame frame(table.slots);
  for (const Input& input : pass.inputs) frame.put(input.slot, constants.at(input.field));
  run(pass.code, frame, {});
  return frame.tensor(table.slot);
}

// Why the shape's programs are not for these fields, although the types fit; empty if they are.
std::string reason(const Shape& shape, const FieldTypes& batch, const Numbers& numbers) {
  for (const auto& [name, entries] : shape.field_sizes) {
    const std::vector<int64_t>& sizes = batch.at(name).sizes;
    for (size_t i = 0; i < entries.size(); ++i) {
      if (entries[i] && numbers[*entries[i]].whole != sizes[i])
        return concat("'", name, "' has ", sizes[i], " in dimension ", i, ", not ", numbers[*entries[i]].whole);
    }
  }
  for (const Shape::Guard& guard : shape.guards) {
    if (!numbers[guard.entry].holds()) return guard.says;
  }
  return {};
}

}  // namespace

bool may_be(const TensorType& type, const TensorType& field) {
  return type.dtype == field.dtype &&
         std::equal(type.sizes.begin(), type.sizes.end(), field.sizes.begin(), field.sizes.end(),
                    [](int64_t wanted, int64_t size) { return wanted == kAnySize || wanted == size; });
}

std::shared_ptr<Shape> bind(const Shape& shape, const FieldTypes& batch, const Tensors& constants, std::string& why) {
  Numbers numbers;
  try {
    numbers = shape.sizes.of(batch);
  } catch (const Error& error) {
    why = error.what();
    return nullptr;
  }
  why = reason(shape, batch, numbers);
  if (!why.empty()) return nullptr;
  auto bound = std::make_shared<Shape>(shape);
  for (auto& [name, type] : bound->fields) type = batch.at(name);
  for (Program& program : bound->programs) set_numbers(program, numbers);
  set_numbers(bound->targets.code, numbers);
  if (const int entry = bound->targets.count_of_sizes; entry >= 0) {
    bound->targets.count = numbers[static_cast<size_t>(entry)].whole;
    TWOBP_CHECK(bound->targets.count >= 0, "the number of targets is ", bound->targets.count);
  }
  for (Table& table : bound->tables) {
    set_numbers(table.code, numbers);
    bound->table_values.push_back(computed(table, constants));
  }
  return bound;
}

}  // namespace twobp::graph
