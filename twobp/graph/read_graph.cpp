#include "twobp/graph/read_graph.h"

#include <algorithm>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <sstream>

#include <torch/headeronly/version.h>

#include "twobp/core/check.h"
#include "twobp/core/json.h"
#include "twobp/core/random.h"
#include "twobp/core/text.h"
#include "twobp/files/input_file.h"
#include "twobp/files/safetensors.h"
#include "twobp/graph/read_code.h"

namespace twobp::graph {
namespace {

constexpr int kMaxDepth = 32;
constexpr uint64_t kMaxBytes = 256 << 20;
constexpr int64_t kVersion = 2;  // earlier ones are read too
constexpr size_t kMostLayers = 10'000;
constexpr size_t kMostShapes = 1'000;
constexpr size_t kMostDimensions = 8;

// With `of_sizes`, a size may be an entry of the shape's sizes, which is returned there.
TensorType read_type(const JsonNode& node, std::vector<std::optional<JsonNode>>* of_sizes = nullptr) {
  TensorType type;
  type.dtype = read_dtype(node["dtype"]);
  int64_t elements = 1;
  const JsonNode shape = node["shape"];
  for (const JsonNode& size : shape.elements(kMostDimensions)) {
    const bool computed = of_sizes != nullptr && size.value().is_object();
    if (of_sizes != nullptr) of_sizes->push_back(computed ? std::optional(size) : std::nullopt);
    if (computed) size["size"];  // throws if there is none
    if (computed) {
      type.sizes.push_back(kAnySize);
      continue;
    }
    type.sizes.push_back(size.integer(0, kMostElements));
    if (type.sizes.back() > 0 && elements > kMostElements / type.sizes.back())
      shape.refuse("the tensor has more than ", kMostElements, " elements");
    elements *= std::max<int64_t>(1, type.sizes.back());
  }
  return type;
}

// Layers of one kind have the same indices, so a constant may be behind several of them.
std::vector<std::string> read_constants(const JsonNode& node) {
  std::vector<std::string> names;
  for (const JsonNode& one : node.elements(kMostNames)) names.push_back(one.text());
  return names;
}

std::vector<Shape::Constant> read_constants_or_tables(const JsonNode& node, size_t tables) {
  std::vector<Shape::Constant> constants;
  for (const JsonNode& one : node.elements(kMostNames)) {
    Shape::Constant& constant = constants.emplace_back();
    if (one.value().is_object()) {
      constant.table = static_cast<int>(one["table"].integer(0, static_cast<int64_t>(tables) - 1));
    } else {
      constant.name = one.text();
    }
  }
  return constants;
}

std::vector<std::string> read_names(const JsonNode& node) {
  std::vector<std::string> names;
  std::set<std::string> seen;
  for (const JsonNode& one : node.elements(kMostNames)) {
    names.push_back(one.text());
    if (!seen.insert(names.back()).second) one.refuse("\"", names.back(), "\" is there twice");
  }
  return names;
}

Projections read_projections(const JsonNode& node, const std::vector<int64_t>& sizes) {
  Projections read;
  if (sizes.size() != 2) node.refuse("the parameter has ", sizes.size(), " dimensions, not two");
  if (const auto columns = node.find("columns")) read.columns = columns->boolean();
  if (const auto groups = node.find("groups")) read.groups = groups->integer(1, kMostElements);
  int64_t sum = 0;
  for (const JsonNode& one : node["outputs"].elements(kMostNames)) {
    const int64_t count = one.integer(1, kMostElements / read.groups);
    read.outputs.push_back(count * read.groups);
    sum += read.outputs.back();
  }
  const int64_t of = sizes[read.columns ? 1 : 0];
  if (sum != of) node["outputs"].refuse("they are ", sum, " in all groups, but the parameter has ", of);
  return read;
}

void read_tensor_types(const JsonNode& root, GraphDescription& graph) {
  for (const auto& [name, node] : root["parameters"].members(kMostNames)) {
    ParameterType& parameter = graph.parameters[name];
    parameter.type = read_type(node);
    if (parameter.type.dtype != at::kFloat && parameter.type.dtype != at::kDouble &&
        parameter.type.dtype != at::kBFloat16)
      node.refuse("the parameter is ", parameter.type.dtype, ": capture the module in float32, float64 or bfloat16");
    const auto frozen = node.find("frozen");
    parameter.frozen = frozen && frozen->boolean();
    const auto product = node.find("product");
    parameter.factor = product.has_value();
    if (product) parameter.projections = read_projections(*product, parameter.type.sizes);
    const auto table = node.find("table");
    parameter.table = table && table->boolean();
  }
  for (const auto& [name, node] : root["buffers"].members(kMostNames)) {
    graph.buffers[name] = read_type(node);
    if (graph.parameters.contains(name)) node.refuse("is also a parameter");
  }
}

// "a", or ["a", "b"] for the rows of b below those of a.
std::vector<LayerParameter> read_layer_parameters(const JsonNode& node, const GraphDescription& graph) {
  std::vector<LayerParameter> parameters;
  std::set<std::string> seen;
  for (const JsonNode& one : node.elements(kMostNames)) {
    LayerParameter& parameter = parameters.emplace_back();
    parameter.names = one.value().is_array() ? read_names(one) : std::vector<std::string>{one.text()};
    if (parameter.names.empty()) one.refuse("there is no name");
    const bool stacked = parameter.names.size() > 1;
    for (const std::string& name : parameter.names) {
      const auto found = graph.parameters.find(name);
      if (found == graph.parameters.end()) one.refuse("there is no parameter \"", name, "\"");
      if (!seen.insert(name).second) one.refuse("\"", name, "\" is there twice");
      const ParameterType& part = found->second;
      if (stacked && part.projections.columns)
        one.refuse("the outputs of \"", name, "\" are columns, so that it cannot be stacked");
      TensorType& whole = parameter.type.type;
      if (&name == &parameter.names.front()) {
        parameter.type = part;
        continue;
      }
      const auto columns = [](const TensorType& type) { return at::IntArrayRef(type.sizes).slice(1); };
      if (whole.sizes.empty() || part.type.sizes.empty() || part.type.dtype != whole.dtype ||
          part.frozen != parameter.type.frozen || part.factor != parameter.type.factor ||
          part.table != parameter.type.table || columns(part.type) != columns(whole))
        one.refuse("the rows of \"", name, "\" cannot be stacked below those of \"", parameter.names[0],
                   "\": dtype, all sizes but the first, and their uses must be equal");
      whole.sizes[0] += part.type.sizes[0];
    }
  }
  return parameters;
}

// The dtypes in which the programs of a layer read its parameters, as under torch.autocast.
void read_dtypes(const JsonNode& node, std::vector<LayerParameter>& parameters) {
  const std::vector<JsonNode> dtypes = node.elements(kMostNames);
  if (dtypes.size() != parameters.size())
    node.refuse("has ", dtypes.size(), " dtypes for ", parameters.size(), " parameters");
  for (size_t i = 0; i < dtypes.size(); ++i) {
    at::ScalarType& own = parameters[i].type.type.dtype;
    const at::ScalarType read = read_dtype(dtypes[i]);
    if (read == own) continue;
    if (own != at::kFloat || (read != at::kBFloat16 && read != at::kHalf))
      dtypes[i].refuse("parameter \"", parameters[i].names[0], "\" is ", own, " and cannot be read as ", read,
                       ": only float32 can be rounded, to bfloat16 or float16");
    own = read;
    parameters[i].rounded = true;
  }
}

void read_layers(const JsonNode& root, GraphDescription& graph) {
  graph.kinds = read_names(root["kinds"]);
  std::vector<const GraphLayer*> first(graph.kinds.size(), nullptr);
  std::set<std::string> buffers;
  std::set<std::string> names;
  const std::vector<JsonNode> layers = root["layers"].elements(kMostLayers);
  if (layers.empty() || graph.kinds.empty()) root["layers"].refuse("there is no layer");
  graph.layers.reserve(layers.size());
  for (const JsonNode& node : layers) {
    GraphLayer layer;
    layer.name = node["name"].text();
    if (!names.insert(layer.name).second) node.refuse("there are two layers \"", layer.name, "\"");
    layer.kind = static_cast<int>(node["kind"].integer(0, static_cast<int64_t>(graph.kinds.size()) - 1));
    layer.parameters = read_layer_parameters(node["parameters"], graph);
    if (const auto dtypes = node.find("dtypes")) read_dtypes(*dtypes, layer.parameters);
    layer.buffers = read_names(node["buffers"]);
    layer.constants = read_constants(node["constants"]);
    for (const std::string& name : layer.buffers) {
      if (!graph.buffers.contains(name)) node.refuse("there is no buffer \"", name, "\"");
      if (!buffers.insert(name).second) node.refuse("buffer \"", name, "\" belongs to another layer too");
    }
    graph.layers.push_back(std::move(layer));
    const GraphLayer*& same = first[static_cast<size_t>(graph.layers.back().kind)];
    const GraphLayer& now = graph.layers.back();
    if (same == nullptr) same = &now;
    const auto type_of = [](const LayerParameter& parameter) { return parameter.type.type; };
    const auto buffer_of = [&](const std::string& name) { return graph.buffers.at(name); };
    const auto alike = [](const auto& a, const auto& b, const auto& of) {
      return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                        [&](const auto& one, const auto& other) { return of(one) == of(other); });
    };
    if (!alike(same->parameters, now.parameters, type_of) || !alike(same->buffers, now.buffers, buffer_of))
      node.refuse("its parameters and buffers have other shapes than those of layer \"", same->name,
                  "\", which is of the same kind");
  }
}

// The parameters that a program adds gradients to.
std::set<int> parameters_with_gradient(const Program& program) {
  std::set<int> all;
  const auto collect = [&](const Code& code) {
    for (const Instruction& one : code) {
      if (one.parameter >= 0) all.insert(one.parameter);
    }
  };
  collect(program.backward_p1);
  for (const Program::Unit& unit : program.backward_p2) collect(unit.code);
  return all;
}

// Checks that a layer has what its program reads, and that it fits the layer before it.
void check_layer(const GraphDescription& graph, const Shape& shape, size_t index, const JsonNode& node) {
  const GraphLayer& layer = graph.layers[index];
  const auto program_of = [&](size_t layer) -> const Program& {
    return shape.programs[static_cast<size_t>(shape.kinds.empty() ? graph.layers[layer].kind : shape.kinds[layer])];
  };
  const Program& program = program_of(index);
  const auto refuse = [&](const auto&... what) { node.refuse("layer \"", layer.name, "\": ", what...); };
  static const std::vector<Program::Output> none;
  const auto& values = index == 0 ? none : program_of(index - 1).outputs;
  const size_t constants = shape.constants.empty() ? layer.constants.size() : shape.constants[index].size();
  for (const Input& input : program.inputs) {
    const auto within = [&](size_t count, const char* what) {
      if (static_cast<size_t>(input.index) >= count)
        refuse("its program reads ", what, " ", input.index, ", but there are only ", count);
    };
    if (input.from == Input::From::kValue) within(values.size(), "value");
    if (input.from == Input::From::kParameter) within(layer.parameters.size(), "parameter");
    if (input.from == Input::From::kBuffer) within(layer.buffers.size(), "buffer");
    if (input.from == Input::From::kConstant) within(constants, "constant");
  }
  for (const Program::At& buffer : program.new_buffers) {
    if (static_cast<size_t>(buffer.index) >= layer.buffers.size())
      refuse("its program changes buffer ", buffer.index, ", but the layer has ", layer.buffers.size());
  }
  const std::set<int> trained = parameters_with_gradient(program);
  for (const int parameter : trained) {
    if (static_cast<size_t>(parameter) >= layer.parameters.size())
      refuse("its program adds to the gradient of parameter ", parameter, ", but the layer has ",
             layer.parameters.size());
  }
  for (size_t i = 0; i < layer.parameters.size(); ++i) {
    if (!layer.parameters[i].type.frozen && !trained.contains(static_cast<int>(i)))
      refuse("parameter \"", layer.parameters[i].names[0], "\" gets no gradient, but is not frozen");
  }
  std::vector<int> with_gradient;
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i].gradient >= 0) with_gradient.push_back(static_cast<int>(i));
  }
  const bool same =
      std::equal(with_gradient.begin(), with_gradient.end(), program.input_gradients.begin(),
                 program.input_gradients.end(), [](int value, const Program::At& at) { return value == at.index; });
  if (!same) refuse("input_gradients must list exactly those outputs of the previous layer that have a gradient");
  const bool last = index + 1 == graph.layers.size();
  const auto predicts = [&] {  // that of an evaluation, which no bundle has
    return shape.variant > 0 && std::all_of(program.outputs.begin() + 1, program.outputs.end(),
                                            [](const Program::Output& one) { return one.gradient < 0; });
  };
  if (program.outputs.empty()) refuse("it has no output");
  if (last && (program.outputs[0].gradient < 0 || (program.outputs.size() > 1 && !predicts())))
    refuse("the last layer must have one output, the loss, with a gradient");
}

// Whether the shape's sequences can be cut into slices.
void read_slices(const JsonNode& node, Shape& shape) {
  if (const auto reason = node.find("no_slices")) shape.no_slices = reason->text();
  const auto positions = node.find("positions");
  if (!positions) return;
  shape.positions = positions->integer(1, kMostElements);
  if (!shape.no_slices.empty()) positions->refuse("\"no_slices\" is given too: give only one of the two");
  for (const auto& [name, type] : shape.fields) {
    if (type.sizes.size() < 2 || type.sizes[1] != shape.positions)
      positions->refuse("the field \"", name, "\" must have the sizes (samples, positions, ...), with ",
                        shape.positions, " positions");
  }
}

// The fields, the numbers that are computed from their sizes, and what must hold of these.
void read_fields(const JsonNode& node, Shape& shape) {
  const auto members = node["fields"].members(kMostNames);
  std::map<std::string, std::vector<std::optional<JsonNode>>> sizes;
  for (const auto& [name, type] : members) {
    auto& of_field = sizes[name];
    shape.fields[name] = read_type(type, &of_field);
  }
  if (const auto list = node.find("sizes")) shape.sizes = Sizes(*list, shape.fields);
  for (const auto& [name, of_field] : sizes) {
    auto& entries = shape.field_sizes[name];
    for (const auto& size : of_field)
      entries.push_back(size ? find_size(*size, &shape.sizes, /*whole=*/true) : std::nullopt);
  }
  if (const auto guards = node.find("guards")) {
    for (const JsonNode& guard : guards->elements(kMostSizes)) {
      guard["size"];  // throws if there is none
      shape.guards.push_back({*find_size(guard, &shape.sizes, /*whole=*/true), guard["says"].text()});
    }
  }
}

Shape read_shape(const JsonNode& node, const GraphDescription& graph,
                 const std::function<bool(const std::string&)>& has_constant, int variant = 0) {
  Shape shape;
  shape.variant = variant;
  read_fields(node, shape);
  read_slices(node, shape);
  const JsonNode programs = node["programs"];
  const std::vector<JsonNode> each = programs.elements(kMostLayers);
  if (const auto kinds = node.find("kinds")) {
    for (const JsonNode& kind : kinds->elements(kMostLayers))
      shape.kinds.push_back(static_cast<int>(kind.integer(0, static_cast<int64_t>(each.size()) - 1)));
    if (shape.kinds.size() != graph.layers.size())
      kinds->refuse("has ", shape.kinds.size(), " numbers for ", graph.layers.size(), " layers");
  } else if (each.size() != graph.kinds.size()) {
    programs.refuse("there are ", each.size(), " programs for ", graph.kinds.size(), " kinds");
  }
  for (const JsonNode& program : each) shape.programs.push_back(read_program(program, shape));
  shape.targets = read_targets(node["targets"], shape);
  const auto check_constant = [&](const std::string& name, const auto&... reader) {
    if (!has_constant(name)) node.refuse("there is no constant \"", name, "\" for ", reader...);
  };
  if (const auto tables = node.find("tables")) {
    for (const JsonNode& table : tables->elements(kMostNames)) {
      shape.tables.push_back(read_table(table, shape));
      for (const Input& input : shape.tables.back().inputs)
        check_constant(input.field, "table ", shape.tables.size() - 1);
    }
    if (!shape.tables.empty() && !shape.of_many()) tables->refuse("the shape has no \"sizes\"");
  }
  if (const auto constants = node.find("constants")) {
    for (const JsonNode& layer : constants->elements(kMostLayers))
      shape.constants.push_back(read_constants_or_tables(layer, shape.tables.size()));
    if (shape.constants.size() != graph.layers.size())
      constants->refuse("has ", shape.constants.size(), " lists for ", graph.layers.size(), " layers");
  }
  for (size_t i = 0; i < graph.layers.size(); ++i) {
    check_layer(graph, shape, i, programs);
    const auto reader = concat("layer \"", graph.layers[i].name, "\"");
    if (shape.constants.empty()) {
      for (const std::string& name : graph.layers[i].constants) check_constant(name, reader);
    } else {
      for (const Shape::Constant& one : shape.constants[i]) {
        if (one.table < 0) check_constant(one.name, reader);
      }
    }
  }
  return shape;
}

void check_format(const JsonNode& root) {
  if (root["format"].text() != "twobp graph")
    root.refuse("not the graph of a captured model: its format is not \"twobp graph\"");
  const int64_t version = root["version"].integer(0, kMostIndex);
  if (version < 1 || version > kVersion)
    root["version"].refuse("is ", version, ", but this program reads version 1 to ", kVersion,
                           ": capture the model again");
  const std::string& torch = root["torch"].text();
  const std::string ours = concat(TORCH_VERSION_MAJOR, '.', TORCH_VERSION_MINOR);
  if (torch != ours && !torch.starts_with(ours + "."))
    root["torch"].refuse("the model was captured with torch ", torch.substr(0, 100), ", but this program has ", ours,
                         ": capture it again with that");
}

std::string checksum_of(std::string_view text) {
  std::ostringstream out;
  out << std::hex << Hash().add(text).value();
  return out.str();
}

Tensors read_constant_file(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "constants.safetensors";
  Tensors tensors;
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) return tensors;
  const SafetensorsFile file(path.string());
  for (const std::string& name : file.names()) tensors.emplace(name, file.tensor(name));
  return tensors;
}

}  // namespace

std::shared_ptr<Graph> parse_graph(std::string_view text, const std::string& origin, Tensors constants) {
  const nlohmann::json parsed = parse_json_object(text, origin, kMaxDepth);
  const JsonNode root(parsed, origin, "");
  check_format(root);
  GraphDescription description;
  description.origin = origin;
  description.checksum = checksum_of(text);
  description.module = root["module"].text();
  description.dtype = read_dtype(root["dtype"]);
  if (const auto precision = root.find("precision")) {
    description.precision = precision->text();
    if (description.precision != "bf16" && description.precision != "fp16")
      precision->refuse("is \"", description.precision.substr(0, 100), "\", but must be \"bf16\" or \"fp16\"");
  }
  read_tensor_types(root, description);
  read_layers(root, description);
  auto graph = std::make_shared<Graph>(std::move(description), std::move(constants));
  const std::vector<JsonNode> shapes = root["shapes"].elements(kMostShapes);
  if (shapes.empty()) root["shapes"].refuse("there is no shape of a micro-batch");
  for (const JsonNode& node : shapes) {
    Shape shape =
        read_shape(node, graph->description(), [&](const std::string& name) { return graph->has_constant(name); });
    if (&node == &shapes.front() && shape.of_many())
      node.refuse("the first shape must be that of one micro-batch, without \"sizes\"");
    if (!shape.of_many() && graph->knows(shape.fields, 0))
      node.refuse("an earlier shape has the same fields: remove one of them");
    graph->add(std::move(shape), {});
  }
  return graph;
}

std::shared_ptr<Graph> read_graph(const std::string& folder) {
  const std::filesystem::path path = std::filesystem::path(folder) / kGraphFile;
  return parse_graph(read_text(path.string(), kMaxBytes), path.string(), read_constant_file(folder));
}

void add_shape(Graph& graph, std::string_view text, const std::string& origin, Tensors constants, int variant) {
  const nlohmann::json parsed = parse_json_object(text, origin, kMaxDepth);
  const JsonNode root(parsed, origin, "");
  const auto has_constant = [&](const std::string& name) {
    return constants.contains(name) || graph.has_constant(name);
  };
  Shape shape = read_shape(root, graph.description(), has_constant, variant);
  if (shape.of_many() || !graph.knows(shape.fields, variant)) graph.add(std::move(shape), std::move(constants));
}

}  // namespace twobp::graph
