#include "twobp/models/captured.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <system_error>

#include "twobp/core/check.h"
#include "twobp/data/array_dataset.h"
#include "twobp/graph/graph.h"
#include "twobp/graph/program_layer.h"
#include "twobp/graph/read_graph.h"

namespace twobp {
namespace {

using graph::Graph;
using graph::GraphLayer;
using graph::Program;

const Graph& graph_of(const ModelOptions& options) {
  const auto& graph = options.as<CapturedOptions>().graph;
  TWOBP_CHECK(graph != nullptr,
              "model.type is \"captured\", but there is no captured model: set model.from to a bundle, the "
              "folder that twobp.capture writes");
  return *graph;
}

// Layers whose frozen parameters differ have other costs.
std::string kind_of(const Graph& graph, const GraphLayer& layer) {
  const graph::GraphDescription& of = graph.description();
  std::string which;
  bool frozen = false;
  for (const graph::LayerParameter& one : layer.parameters) {
    frozen = frozen || one.type.frozen;
    which += one.type.frozen ? '0' : '1';
  }
  const std::string& kind = of.kinds[static_cast<size_t>(layer.kind)];
  return frozen ? concat(kind, ", trained ", which) : kind;
}

bool is_trained(const GraphLayer& layer) {
  return std::any_of(layer.parameters.begin(), layer.parameters.end(),
                     [](const graph::LayerParameter& one) { return !one.type.frozen; });
}

// The rows of the table that the ids of the field are looked up in; 0 if there is none.
int64_t rows_of_table(const Graph& graph, const std::string& field) {
  for (size_t i = 0; i < graph.layers().size(); ++i) {
    const GraphLayer& layer = graph.layers()[i];
    const Program& program = graph.program(graph.shape(), static_cast<int>(i));
    std::set<int> ids;              // slots with the field, or a view of it
    std::map<int, int> parameters;  // by slot
    for (const graph::Input& input : program.inputs) {
      if (input.from == graph::Input::From::kField && input.field == field) ids.insert(input.slot);
      if (input.from == graph::Input::From::kParameter) parameters[input.slot] = input.index;
    }
    for (const graph::Instruction& one : program.forward) {
      if (one.op->view && ids.contains(one.arguments[0].slot)) ids.insert(one.out[0]);
      if (one.op->schema->name() != "aten::embedding" || !ids.contains(one.arguments[1].slot)) continue;
      const auto table = parameters.find(one.arguments[0].slot);
      if (table == parameters.end()) continue;
      const auto& sizes = layer.parameters[static_cast<size_t>(table->second)].type.type.sizes;
      if (!sizes.empty()) return sizes[0];
    }
  }
  return 0;
}

// "twobp::dropout in layer 'head'": the first instruction for which `which` is true. Empty if there is none.
template <typename Which>
std::string find_instruction(const Graph& graph, const Which& which) {
  for (size_t i = 0; i < graph.layers().size(); ++i) {
    const GraphLayer& layer = graph.layers()[i];
    const Program& program = graph.program(graph.shape(), static_cast<int>(i));
    std::vector<const graph::Code*> codes{&program.forward, &program.evaluate, &program.backward_p1};
    for (const Program::Unit& unit : program.backward_p2) codes.push_back(&unit.code);
    for (const graph::Code* code : codes) {
      const auto found = std::find_if(code->begin(), code->end(),
                                      [&](const graph::Instruction& one) { return one.op != nullptr && which(one); });
      if (found != code->end()) return concat(found->op->schema->name(), " in layer '", layer.name, "'");
    }
  }
  return {};
}

// Operators that LibTorch has for CPUs alone, and that we do not compute in another way.
std::string no_device(const ModelOptions& options) {
  const std::string found = find_instruction(graph_of(options), [](const graph::Instruction& one) {
    return one.op->schema->name().starts_with("aten::mkldnn_");
  });
  return found.empty() ? found : concat("LibTorch has ", found, " for CPUs alone");
}

// A graph repeats what the host chose when it was recorded.
std::string no_graph(const ModelOptions& options) {
  const auto draws = [](const graph::Argument& one) { return one.kind == graph::Argument::Kind::kRandom; };
  std::string found = find_instruction(graph_of(options), [&](const graph::Instruction& one) {
    return std::any_of(one.arguments.begin(), one.arguments.end(), draws);
  });
  if (!found.empty()) return concat("the host gives ", found, " another seed in every step");
  found = find_instruction(graph_of(options), [](const graph::Instruction& one) {
    return one.op->schema->name().starts_with("twobp::grouped_mm");
  });
  return found.empty() ? found : concat("the host reads the sizes of the groups of ", found);
}

ModelInput input_of(const ModelOptions& options) {
  ModelInput input;
  input.kind = InputKind::kFields;
  if (!options.as<CapturedOptions>().graph) return input;  // check() throws
  const Graph& graph = graph_of(options);
  const graph::FieldTypes& fields = graph.shape().fields;
  const auto& chosen = options.as<CapturedOptions>().sizes;
  for (const auto& [name, type] : fields)
    input.fields.push_back({name, type.dtype, chosen.empty() ? type.sizes : chosen.at(name)});
  input.vocab = are_tokens(input.fields) ? rows_of_table(graph, "input_ids") : 0;
  return input;
}

}  // namespace

ModelSpec captured(const std::shared_ptr<const Graph>& graph) {
  ModelSpec model;
  model.first_trainable = static_cast<int>(graph->layers().size());
  for (const GraphLayer& layer : graph->layers()) {
    const auto index = static_cast<int>(model.layers.size());
    if (is_trained(layer)) model.first_trainable = std::min(model.first_trainable, index);
    model.layers.push_back({layer.name, kind_of(*graph, layer),
                            [graph, index] { return std::make_unique<graph::ProgramLayer>(graph, index); }});
  }
  model.count_targets = [graph](const Fields& fields) { return graph->count_targets(fields); };
  return model;
}

bool is_bundle(const std::string& folder) {
  std::error_code ignored;
  return std::filesystem::exists(std::filesystem::path(folder) / graph::kGraphFile, ignored);
}

ModelOptions read_bundle(const std::string& folder) {
  ModelOptions options(CapturedOptions::kType);
  auto& captured = options.as<CapturedOptions>();
  captured.graph = graph::read_graph(folder);
  captured.program = captured.graph->description().checksum;
  return options;
}

bool serves_many(const ModelOptions& options) {
  if (options.name() != CapturedOptions::kType) return false;
  const auto& graph = options.as<CapturedOptions>().graph;
  return graph != nullptr && graph->of_many();
}

void take_fields(ModelOptions& options, const CaptureFields& fields) {
  auto& captured = options.as<CapturedOptions>();
  graph::FieldTypes types = captured.graph->shape().fields;
  std::map<std::string, std::vector<int64_t>> sizes;
  for (auto& [name, type] : types) {
    const auto field = fields.find(name);
    if (field == fields.end()) return;  // what is missing is refused later
    type.sizes = sizes[name] = field->second.second;
  }
  if (captured.graph->serves(types)) captured.sizes = std::move(sizes);
}

ModelType captured_type() {
  ModelType type = make_model_type<CapturedOptions>(
      {TWOBP_KEY(CapturedOptions, program, "checksum of the graph.json in model.from, which sets it; do not set it")});
  type.is_bundle = true;
  type.input = input_of;
  type.weights = [](const ModelOptions& options) { return options.as<CapturedOptions>().weights; };
  // The module's other tensors, which its programs do not read, or read as constants.
  type.names = [](const ModelOptions&) {
    TensorNames names;
    names.has_others = true;
    return names;
  };
  type.check = [](const ModelOptions& options) { graph_of(options); };
  type.captured_for = [](const ModelOptions& options) { return graph_of(options).description().precision; };
  type.no_device = no_device;
  type.no_graph = no_graph;
  type.no_slices = [](const ModelOptions& options) {
    const graph::Shape& shape = graph_of(options).shape();
    if (shape.positions > 0) return std::string();
    return shape.no_slices.empty() ? "its bundle does not say whether they can be cut: capture it again"
                                   : shape.no_slices;
  };
  type.build = [](const ModelOptions& options, const BuildSettings&) {
    graph_of(options);
    return captured(options.as<CapturedOptions>().graph);
  };
  return type;
}

}  // namespace twobp
