
#include <map>
#include <set>

#include "twobp/graph/read_code.h"

namespace twobp::graph {
namespace {

constexpr size_t kMostValues = 10'000;  // that pass between two layers

// Checks that every slot is written once, and before it is read.
class Flow {
 public:
  explicit Flow(int slots) : writer_(static_cast<size_t>(slots), kNobody) {}

  static constexpr int kBefore = -1;  // forward and backward-p1, which everything may read
  void write(int slot, const JsonNode& node, int by = kBefore) {
    if (slot < 0) return;
    int& writer = writer_[static_cast<size_t>(slot)];
    if (writer != kNobody) node.refuse("slot ", slot, " is written a second time");
    writer = by;
  }
  void read(int slot, const JsonNode& node, int by = kBefore) const {
    const int writer = writer_[static_cast<size_t>(slot)];
    if (writer == kNobody) node.refuse("slot ", slot, " is read, but nothing has been written there");
    if (writer != kBefore && writer != by) node.refuse("slot ", slot, " belongs to another unit");
  }
  void pass(const Code& code, const JsonNode& list, int by = kBefore) {
    const std::vector<JsonNode> nodes = list.elements(kMostInstructions);
    for (size_t i = 0; i < code.size(); ++i) {
      for_each_read(code[i], [&](int slot) { read(slot, nodes[i], by); });
      for (const int slot : code[i].out) write(slot, nodes[i], by);
    }
  }

 private:
  static constexpr int kNobody = -2;
  std::vector<int> writer_;
};

Input read_input(const JsonNode& node, int slots, const FieldTypes& fields) {
  Input input;
  input.slot = static_cast<int>(node["slot"].integer(0, slots - 1));
  const std::string& from = node["from"].text();
  const auto indexed = [&](Input::From which) {
    input.from = which;
    input.index = static_cast<int>(node["index"].integer(0, kMostIndex));
  };
  if (from == "value") {
    indexed(Input::From::kValue);
  } else if (from == "parameter") {
    indexed(Input::From::kParameter);
  } else if (from == "buffer") {
    indexed(Input::From::kBuffer);
  } else if (from == "constant") {
    indexed(Input::From::kConstant);
  } else if (from == "loss_weight") {
    input.from = Input::From::kLossWeight;
  } else if (from == "field") {
    input.from = Input::From::kField;
    input.field = node["name"].text();
    if (!fields.contains(input.field)) node.refuse("the shape has no field \"", input.field, "\"");
    const auto whole = node.find("whole");
    input.whole = whole && whole->boolean();
  } else {
    node["from"].refuse("\"", from.substr(0, 100), "\" is not a known kind of input");
  }
  return input;
}

std::vector<Program::At> read_places(const JsonNode& list, int slots) {
  std::vector<Program::At> places;
  for (const JsonNode& node : list.elements(kMostNames)) {
    places.push_back(
        {static_cast<int>(node["index"].integer(0, kMostIndex)), static_cast<int>(node["slot"].integer(0, slots - 1))});
    if (places.size() > 1 && places[places.size() - 2].index >= places.back().index)
      node.refuse("the list is not sorted by index, or has an index twice");
  }
  return places;
}

std::vector<Input> read_inputs(const JsonNode& list, int slots, const FieldTypes& fields, Flow& flow) {
  std::vector<Input> inputs;
  std::set<int> values;
  for (const JsonNode& node : list.elements(kMostNames)) {
    inputs.push_back(read_input(node, slots, fields));
    flow.write(inputs.back().slot, node);
    if (inputs.back().from == Input::From::kValue && !values.insert(inputs.back().index).second)
      node.refuse("value ", inputs.back().index, " is there twice");
  }
  return inputs;
}

// Gives the calls of attention and of its derivative the same numbers, by the log_sum_exp that passes between.
void number_attention(Program& program) {
  std::map<int, int> numbers;  // by slot
  for (Instruction& one : program.forward) {
    const std::string& name = one.op->schema->name();
    if (name != "twobp::attention" && name != "twobp::causal_attention") continue;
    one.attention = program.attentions++;
    if (one.out.back() >= 0) numbers[one.out.back()] = one.attention;
  }
  for (Instruction& one : program.backward_p1) {
    if (one.op == nullptr) continue;
    const std::string& name = one.op->schema->name();
    const bool apart = name == "twobp::causal_attention_backward";
    if (!apart && name != "twobp::attention_backward") continue;
    const auto forward = numbers.find(one.arguments[apart ? 5 : 3].slot);
    if (forward != numbers.end()) one.attention = forward->second;
  }
}

}  // namespace

Program read_program(const JsonNode& node, const Shape& shape) {
  const FieldTypes& fields = shape.fields;
  Program program;
  program.slots = static_cast<int>(node["slots"].integer(1, kMostSlots));
  Flow flow(program.slots);
  program.inputs = read_inputs(node["inputs"], program.slots, fields, flow);
  Flow evaluation = flow;

  const CodeRules forward{program.slots, /*gradients=*/false, /*random=*/true, shape.positions, &shape.sizes};
  program.forward = read_code(node["forward"], forward);
  flow.pass(program.forward, node["forward"]);
  const auto evaluate = node.find("evaluate");
  if (evaluate) {
    program.evaluate = read_code(*evaluate, forward);
    evaluation.pass(program.evaluate, *evaluate);
  } else {
    program.evaluate = program.forward;
  }
  for (const JsonNode& output : node["outputs"].elements(kMostValues)) {
    Program::Output& made = program.outputs.emplace_back();
    made.slot = static_cast<int>(output["slot"].integer(0, program.slots - 1));
    flow.read(made.slot, output);
    if (evaluate) evaluation.read(made.slot, output);
    if (const auto gradient = output.find("gradient"))
      made.gradient = static_cast<int>(gradient->integer(0, program.slots - 1));
  }
  program.new_buffers = read_places(node["new_buffers"], program.slots);
  for (const Program::At& buffer : program.new_buffers) flow.read(buffer.slot, node["new_buffers"]);

  const CodeRules backward{program.slots, /*gradients=*/true, /*random=*/false, shape.positions, &shape.sizes};
  for (const Program::Output& output : program.outputs) flow.write(output.gradient, node["outputs"]);
  program.backward_p1 = read_code(node["backward_p1"], backward);
  flow.pass(program.backward_p1, node["backward_p1"]);
  program.input_gradients = read_places(node["input_gradients"], program.slots);
  for (const Program::At& gradient : program.input_gradients) flow.read(gradient.slot, node["input_gradients"]);
  for (const JsonNode& unit : node["backward_p2"].elements(kMostInstructions)) {
    const auto index = static_cast<int>(program.backward_p2.size());
    program.backward_p2.push_back({unit["name"].text(), read_code(unit["code"], backward)});
    flow.pass(program.backward_p2.back().code, unit["code"], index);
  }
  number_attention(program);
  return program;
}

Targets read_targets(const JsonNode& node, const Shape& shape) {
  Targets targets;
  if (const auto count = node.find("count")) {
    if (const auto size = find_size(*count, &shape.sizes, /*whole=*/true)) {
      targets.count_of_sizes = static_cast<int>(*size);
      targets.count = 0;
    } else {
      targets.count = count->integer(0, kMostElements);
    }
    if (!node.has("checks")) return targets;
  }
  targets.slots = static_cast<int>(node["slots"].integer(1, kMostSlots));
  Flow flow(targets.slots);
  targets.inputs = read_inputs(node["inputs"], targets.slots, shape.fields, flow);
  for (const Input& input : targets.inputs) {
    if (input.from != Input::From::kField)
      node["inputs"].refuse("the count of targets may read fields only: every \"from\" must be \"field\"");
  }
  targets.code = read_code(node["code"], {targets.slots, false, false, 0, &shape.sizes});
  flow.pass(targets.code, node["code"]);
  const auto read_slot = [&](const JsonNode& slot) {
    const auto number = static_cast<int>(slot.integer(0, targets.slots - 1));
    flow.read(number, slot);
    return number;
  };
  if (targets.count < 0) targets.slot = read_slot(node["slot"]);
  if (const auto checks = node.find("checks")) {
    for (const JsonNode& check : checks->elements(kMostSlots)) {
      targets.checks.push_back({read_slot(check["slot"]), check["says"].text()});
    }
  }
  return targets;
}

Table read_table(const JsonNode& node, const Shape& shape) {
  Table table;
  table.slots = static_cast<int>(node["slots"].integer(1, kMostSlots));
  Flow flow(table.slots);
  for (const JsonNode& one : node["inputs"].elements(kMostNames)) {
    Input& input = table.inputs.emplace_back();
    input.from = Input::From::kConstant;
    input.field = one["constant"].text();
    input.slot = static_cast<int>(one["slot"].integer(0, table.slots - 1));
    flow.write(input.slot, one);
  }
  table.code = read_code(node["code"], {table.slots, false, false, 0, &shape.sizes});
  flow.pass(table.code, node["code"]);
  table.slot = static_cast<int>(node["slot"].integer(0, table.slots - 1));
  flow.read(table.slot, node["slot"]);
  return table;
}

}  // namespace twobp::graph
