#include "twobp/graph/read_code.h"

#include <limits>
#include <optional>
#include <utility>

#include <ATen/ScalarOps.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/jit_type.h>

namespace twobp::graph {
namespace {

using c10::TypeKind;

constexpr size_t kMostArguments = 64;
constexpr size_t kMostListed = 100'000;  // elements of a list argument
constexpr int64_t kMostInteger = std::numeric_limits<int64_t>::max();
constexpr std::pair<const char*, at::ScalarType> kDtypes[] = {
    {"float32", at::kFloat}, {"float64", at::kDouble}, {"bfloat16", at::kBFloat16}, {"float16", at::kHalf},
    {"int64", at::kLong},    {"int32", at::kInt},      {"int16", at::kShort},       {"int8", at::kChar},
    {"uint8", at::kByte},    {"bool", at::kBool}};
constexpr std::pair<const char*, at::MemoryFormat> kFormats[] = {
    {"contiguous", at::MemoryFormat::Contiguous},
    {"preserve", at::MemoryFormat::Preserve},
    {"channels_last", at::MemoryFormat::ChannelsLast},
    {"channels_last_3d", at::MemoryFormat::ChannelsLast3d}};

template <typename T, size_t n>
T named(const JsonNode& node, const std::pair<const char*, T> (&names)[n], const char* what) {
  for (const auto& [name, value] : names) {
    if (node.text() == name) return value;
  }
  node.refuse("\"", node.text().substr(0, 100), "\" is not a known ", what);
}

int read_slot(const JsonNode& node, int slots) {
  return static_cast<int>(node.integer(0, slots - 1));
}

// "{"v": 3}".
int read_slot_object(const JsonNode& node, int slots) {
  return read_slot(node["v"], slots);
}

double read_double(const JsonNode& node) {
  const auto& value = node.value();
  if (value.is_number()) return value.get<double>();
  if (!value.is_object()) node.refuse("is not a number");
  constexpr std::pair<const char*, double> kNotFinite[] = {{"inf", std::numeric_limits<double>::infinity()},
                                                           {"-inf", -std::numeric_limits<double>::infinity()},
                                                           {"nan", std::numeric_limits<double>::quiet_NaN()}};
  return named(node["float"], kNotFinite, "number");
}

at::Scalar read_scalar(const JsonNode& node) {
  const auto& value = node.value();
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number_integer()) return node.integer(-kMostInteger - 1, kMostInteger);
  return read_double(node);
}

template <typename T, typename Read>
c10::IValue read_list(const JsonNode& node, const Read& read) {
  c10::List<T> list;
  for (const JsonNode& one : node.elements(kMostListed)) list.push_back(read(one));
  return list;
}

// A value of a type that is no tensor.
c10::IValue read_value(const JsonNode& node, const c10::Type& type) {
  switch (type.kind()) {
    case TypeKind::FloatType:
      return read_double(node);
    case TypeKind::BoolType:
      return node.boolean();
    case TypeKind::NumberType:
      return read_scalar(node);
    case TypeKind::StringType:
      return node.text();
    case TypeKind::ScalarTypeType:
      return static_cast<int64_t>(read_dtype(node["dtype"]));
    case TypeKind::MemoryFormatType:
      return static_cast<int64_t>(named(node["memory_format"], kFormats, "memory format"));
    default:
      node.refuse("arguments of type ", type.str(), " can only be null");
  }
}

c10::IValue read_values(const JsonNode& node, const c10::Type& element) {
  switch (element.kind()) {
    case TypeKind::FloatType:
      return read_list<double>(node, [](const JsonNode& one) { return read_double(one); });
    case TypeKind::BoolType:
      return read_list<bool>(node, [](const JsonNode& one) { return one.boolean(); });
    case TypeKind::NumberType:
      return read_list<at::Scalar>(node, [](const JsonNode& one) { return read_scalar(one); });
    default:
      node.refuse("lists of ", element.str(), " are not known");
  }
}

bool is_maybe_tensor(const c10::Type& type) {
  return type.kind() == TypeKind::OptionalType && type.containedType(0)->kind() == TypeKind::TensorType;
}

Argument read_tensor(const JsonNode& node, const CodeRules& rules) {
  Argument argument;
  if (const auto number = node.find("number")) {
    if (const auto size = find_size(*number, rules.sizes, /*whole=*/false))
      argument.of_sizes.push_back({*size, /*whole=*/false});
    argument.value = wrapped_number(argument.of_sizes.empty() ? read_scalar(*number) : at::Scalar(0));
    return argument;
  }
  argument.kind = Argument::Kind::kSlot;
  argument.slot = read_slot_object(node, rules.slots);
  return argument;
}

Argument read_tensors(const JsonNode& node, bool maybe, int slots) {
  Argument argument;
  argument.kind = maybe ? Argument::Kind::kMaybeTensors : Argument::Kind::kTensors;
  for (const JsonNode& one : node.elements(kMostListed))
    argument.slots.push_back(maybe && one.value().is_null() ? -1 : read_slot_object(one, slots));
  return argument;
}

Argument read_random(const JsonNode& node, const CodeRules& rules) {
  if (!rules.random) node.refuse("only forward and evaluate may call for random numbers");
  Argument argument;
  argument.kind = Argument::Kind::kRandom;
  argument.slot = static_cast<int>(node["random"].integer(0, std::numeric_limits<int>::max()));
  return argument;
}

// Whether a number depends on positions: {"positions": 2}, {"position": "begin"} or {"position": "end"}.
std::optional<OfPositions> find_of_positions(const JsonNode& node, const CodeRules& rules) {
  if (!node.value().is_object()) return std::nullopt;
  const auto count = node.find("positions");
  const auto which = node.find("position");
  if (!count && !which) return std::nullopt;
  if (rules.positions == 0) node.refuse("the shape has no number of positions");
  OfPositions found;
  if (count) {
    found.times = count->integer(1, kMostInteger / rules.positions);
    return found;
  }
  constexpr std::pair<const char*, OfPositions::What> kWhich[] = {{"begin", OfPositions::What::kBegin},
                                                                  {"end", OfPositions::What::kEnd}};
  found.what = named(*which, kWhich, "position");
  return found;
}

bool is_integer(const c10::Type& type) {
  return type.kind() == TypeKind::IntType || type.kind() == TypeKind::SymIntType;
}

// A whole number, or a list of them, that may depend on positions.
Argument read_integers(const JsonNode& node, bool list, const CodeRules& rules) {
  Argument argument;
  const auto read = [&](const JsonNode& one, size_t index) {
    if (const auto size = find_size(one, rules.sizes, /*whole=*/true)) {
      argument.of_sizes.push_back({*size, /*whole=*/true, index});
      return int64_t{0};
    }
    std::optional<OfPositions> depends = find_of_positions(one, rules);
    if (!depends) return one.integer(-kMostInteger - 1, kMostInteger);
    depends->index = index;
    argument.of_positions.push_back(*depends);
    return depends->value(0, rules.positions);
  };
  if (!list) {
    argument.value = read(node, 0);
    return argument;
  }
  c10::List<int64_t> numbers;
  for (const JsonNode& one : node.elements(kMostListed)) numbers.push_back(read(one, numbers.size()));
  argument.value = std::move(numbers);
  return argument;
}

Argument read_argument(const JsonNode& node, const c10::Argument& schema, const Operator& op, const CodeRules& rules) {
  const c10::Type* type = schema.real_type().get();
  if (op.own != nullptr && schema.name() == "random") return read_random(node, rules);
  if (type->kind() == TypeKind::OptionalType) {
    type = type->containedType(0).get();
    // Numbers that are not seeded would differ from run to run.
    if (type->kind() == TypeKind::GeneratorType) return read_random(node, rules);
    if (node.value().is_null()) return {};
  }
  Argument argument;
  switch (type->kind()) {
    case TypeKind::TensorType:
      return read_tensor(node, rules);
    case TypeKind::GeneratorType:
      return read_random(node, rules);
    case TypeKind::DeviceObjType:
      node["device"].integer(0, 0);
      argument.kind = Argument::Kind::kDevice;
      return argument;
    case TypeKind::ListType: {
      const c10::Type& element = *type->containedType(0);
      const bool maybe = is_maybe_tensor(element);
      if (maybe || element.kind() == TypeKind::TensorType) return read_tensors(node, maybe, rules.slots);
      if (is_integer(element)) return read_integers(node, /*list=*/true, rules);
      argument.value = read_values(node, element);
      return argument;
    }
    default:
      if (is_integer(*type)) return read_integers(node, /*list=*/false, rules);
      if (type->kind() == TypeKind::NumberType || type->kind() == TypeKind::FloatType) {
        if (const auto size = find_size(node, rules.sizes, /*whole=*/false)) {
          argument.of_sizes.push_back({*size, /*whole=*/false});
          argument.value = type->kind() == TypeKind::FloatType ? c10::IValue(0.0) : c10::IValue(int64_t{0});
          return argument;
        }
      }
      argument.value = read_value(node, *type);
      return argument;
  }
}

// The slots of the results. Only tensors have slots.
void read_out(const JsonNode& node, const Operator& op, int slots, Instruction& one) {
  const auto& returns = op.schema->returns();
  const JsonNode out = node["out"];
  const auto list = node.find("list");
  one.list = list && list->boolean();
  const bool gives_list = returns.size() == 1 && returns[0].type()->kind() == TypeKind::ListType;
  if (one.list != gives_list)
    out.refuse(gives_list ? "the operator returns a list, so \"list\" must be true"
                          : "the operator returns no list, so \"list\" must not be true");
  const std::vector<JsonNode> results = out.elements(kMostListed);
  if (!one.list && results.size() != returns.size())
    out.refuse("has ", results.size(), " slots, but the operator has ", returns.size(), " results");
  for (size_t i = 0; i < results.size(); ++i) {
    if (results[i].value().is_null()) {
      one.out.push_back(-1);
      continue;
    }
    const c10::Type& type = one.list ? *returns[0].type()->containedType(0) : *returns[i].type();
    if (type.kind() != TypeKind::TensorType) results[i].refuse("the result is no tensor, so it has no slot");
    one.out.push_back(read_slot(results[i], slots));
  }
}

void read_call(const JsonNode& node, const CodeRules& rules, Instruction& one) {
  const JsonNode name = node["op"];
  try {
    one.op = &find_operator(name.text());
  } catch (const Error& error) {
    name.refuse(error.what());
  }
  const auto& schema = one.op->schema->arguments();
  const JsonNode args = node["args"];
  const std::vector<JsonNode> given = args.elements(kMostArguments);
  if (given.size() != schema.size())
    args.refuse("has ", given.size(), " arguments, but ", name.text(), " has ", schema.size());
  bool seeded = false;
  for (size_t i = 0; i < given.size(); ++i) {
    one.arguments.push_back(read_argument(given[i], schema[i], *one.op, rules));
    seeded = seeded || one.arguments.back().kind == Argument::Kind::kRandom;
  }
  if (one.op->aten && one.op->aten->hasTag(at::Tag::nondeterministic_seeded) && !seeded) {
    // Attention draws only if it has dropout.
    bool draws = true;
    for (size_t i = 0; i < schema.size(); ++i) {
      const c10::IValue& value = one.arguments[i].value;
      if (schema[i].name() == "dropout_p")
        draws = !value.isDouble() || value.toDouble() != 0 || !one.arguments[i].of_sizes.empty();
    }
    if (draws) node.refuse(name.text(), " draws random numbers without a seed: give it a \"random\" argument");
  }
  read_out(node, *one.op, rules.slots, one);
}

void read_gradient(const JsonNode& node, const CodeRules& rules, Instruction& one) {
  if (!rules.gradients) node.refuse("only backward_p1 and backward_p2 may add to gradients");
  one.parameter = static_cast<int>(node["add_to"].integer(0, std::numeric_limits<int>::max()));
  constexpr std::pair<const char*, Instruction::Kind> kHow[] = {{"product", Instruction::Kind::kProduct},
                                                                {"sum", Instruction::Kind::kSum},
                                                                {"groups", Instruction::Kind::kGroups},
                                                                {"embedding", Instruction::Kind::kEmbedding},
                                                                {"nothing", Instruction::Kind::kNothing}};
  one.kind = named(node["how"], kHow, "way to add to a gradient");
  const JsonNode args = node["args"];
  const std::vector<JsonNode> given = args.elements(kMostArguments);
  const bool embedding = one.kind == Instruction::Kind::kEmbedding;
  const size_t tensors = one.kind == Instruction::Kind::kNothing  ? 0
                         : one.kind == Instruction::Kind::kSum    ? 1
                         : one.kind == Instruction::Kind::kGroups ? 3
                                                                  : 2;
  const size_t count = tensors + (embedding ? 1 : 0);
  if (given.size() != count) args.refuse("has ", given.size(), " arguments instead of ", count);
  for (size_t i = 0; i < tensors; ++i) {
    Argument argument;
    argument.kind = Argument::Kind::kSlot;
    argument.slot = read_slot_object(given[i], rules.slots);
    one.arguments.push_back(argument);
  }
  if (embedding) one.arguments.emplace_back().value = given[2].integer(-1, kMostInteger);
}

}  // namespace

at::ScalarType read_dtype(const JsonNode& node) {
  return named(node, kDtypes, "dtype");
}

std::optional<size_t> find_size(const JsonNode& node, const Sizes* sizes, bool whole) {
  if (!node.value().is_object()) return std::nullopt;
  const auto size = node.find("size");
  if (!size) return std::nullopt;
  if (sizes == nullptr || sizes->count() == 0) size->refuse("the shape has no \"sizes\"");
  const auto entry = static_cast<size_t>(size->integer(0, static_cast<int64_t>(sizes->count()) - 1));
  if (whole && sizes->is_real(entry)) size->refuse("entry ", entry, " is no whole number");
  return entry;
}

c10::IValue wrapped_number(const at::Scalar& number) {
  at::Tensor tensor = at::scalar_to_tensor(number);
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

Code read_code(const JsonNode& list, const CodeRules& rules) {
  Code code;
  for (const JsonNode& node : list.elements(kMostInstructions)) {
    Instruction one;
    if (node.has("add_to")) {
      read_gradient(node, rules, one);
      one.place = concat(node.place(), ", add_to ", one.parameter);
    } else {
      read_call(node, rules, one);
      one.place = concat(node.place(), ", ", node["op"].text());
    }
    code.push_back(std::move(one));
  }
  return code;
}

}  // namespace twobp::graph
