// This is a captured MLP, written by hand: Linear, ReLU, some middle layers, Linear and the squared error. A middle
// layer is y = dropout(relu(linear(x)) * c). A buffer follows the mean of y, and c is a constant. The first and the
// last middle layer have the same weight.
#pragma once

#include <string>

#include <torch/headeronly/version.h>

#include "twobp/graph/read_graph.h"

namespace twobp::test {

inline constexpr int64_t kIn = 3, kHidden = 5, kOut = 2, kSamples = 4;

struct MlpGraph {
  int middle = 2;  // number of layers
  std::string dtype = "float32";
  std::string dropout = "0.25";  // probability
  bool frozen_first = false;

  std::string json() const {
    std::string layers;
    std::string parameters;
    std::string buffers;
    const auto add = [](std::string& list, const std::string& item) {
      if (!list.empty()) list += ", ";
      list += item;
    };
    const auto parameter = [&](const std::string& name, const std::string& shape, bool frozen = false) {
      add(parameters, "\"" + name + "\": {\"dtype\": \"" + dtype + "\", \"shape\": " + shape +
                          ", \"frozen\": " + (frozen ? "true" : "false") + "}");
    };
    parameter("first.weight", "[5, 3]", frozen_first);
    parameter("first.bias", "[5]", frozen_first);
    parameter("last.weight", "[2, 5]");
    parameter("last.bias", "[2]");
    add(layers,
        R"({"name": "first", "kind": 0, "parameters": ["first.weight", "first.bias"], "buffers": [], "constants": []})");
    for (int i = 0; i < middle; ++i) {
      const std::string name = "middle." + std::to_string(i);
      const std::string weight = i + 1 == middle && i > 0 ? "middle.0" : name;  // tied
      if (weight == name) parameter(name + ".weight", "[5, 5]");
      parameter(name + ".bias", "[5]");
      add(buffers, "\"" + name + ".mean\": {\"dtype\": \"" + dtype + "\", \"shape\": [5]}");
      add(layers, "{\"name\": \"" + name + "\", \"kind\": " + (frozen_first && i == 0 ? "3" : "1") +
                      ", \"parameters\": [\"" + weight + ".weight\", \"" + name + ".bias\"], \"buffers\": [\"" + name +
                      ".mean\"], \"constants\": [\"scale\"]}");
    }
    add(layers,
        R"({"name": "last", "kind": 2, "parameters": ["last.weight", "last.bias"], "buffers": [], "constants": []})");
    return R"({"format": "twobp graph", "version": 1, "torch": ")" TORCH_VERSION R"(", "module": "Mlp", "dtype": ")" +
           dtype + "\", \"layers\": [" + layers + R"(], "kinds": ["first", "middle", "last")" +
           (frozen_first ? R"(, "after frozen")" : "") + R"(], "parameters": {)" + parameters + "}, \"buffers\": {" +
           buffers + "}, \"shapes\": [" + shape(kSamples) + "]}";
  }

  // Returns the programs for micro-batches of this number of samples.
  std::string shape(int64_t samples) const {
    const std::string n = std::to_string(samples);
    const std::string fields = R"("fields": {"input": {"dtype": ")" + dtype + R"(", "shape": [)" + n +
                               R"(, 3]}, "target": {"dtype": ")" + dtype + R"(", "shape": [)" + n + ", 2]}}";
    const std::string p1 =
        frozen_first ? "" : R"({"op": "aten::threshold_backward", "args": [{"v": 6}, {"v": 5}, 0], "out": [7]},
           {"op": "aten::sum.dim_IntList", "args": [{"v": 7}, [0], false, null], "out": [8]},
           {"add_to": 1, "how": "sum", "args": [{"v": 8}]})";
    const std::string p2 =
        frozen_first ? "" : R"({"name": "first.weight", "code": [{"op": "aten::t", "args": [{"v": 7}], "out": [9]},
           {"add_to": 0, "how": "product", "args": [{"v": 9}, {"v": 0}]}]})";
    const std::string first = R"({"slots": 10,
      "inputs": [{"from": "field", "name": "input", "slot": 0}, {"from": "parameter", "index": 0, "slot": 1},
                 {"from": "parameter", "index": 1, "slot": 2}],
      "forward": [{"op": "aten::t", "args": [{"v": 1}], "out": [3]},
                  {"op": "aten::addmm", "args": [{"v": 2}, {"v": 0}, {"v": 3}, 1, 1], "out": [4]},
                  {"op": "aten::relu", "args": [{"v": 4}], "out": [5]}],
      "outputs": [{"slot": 5)" +
                              std::string(frozen_first ? "" : R"(, "gradient": 6)") +
                              R"(}], "new_buffers": [], "backward_p1": [)" + p1 +
                              R"(], "input_gradients": [], "backward_p2": [)" + p2 + "]}";
    // The layer after a frozen one gives no input gradient.
    const auto middle_with = [&](const std::string& gradient) {
      return R"({"slots": 30,
      "inputs": [{"from": "value", "index": 0, "slot": 0}, {"from": "parameter", "index": 0, "slot": 1},
                 {"from": "parameter", "index": 1, "slot": 2}, {"from": "buffer", "index": 0, "slot": 3},
                 {"from": "constant", "index": 0, "slot": 4}],
      "forward": [{"op": "aten::t", "args": [{"v": 1}], "out": [5]},
                  {"op": "aten::addmm", "args": [{"v": 2}, {"v": 0}, {"v": 5}, 1, 1], "out": [6]},
                  {"op": "aten::relu", "args": [{"v": 6}], "out": [7]},
                  {"op": "aten::mul.Tensor", "args": [{"v": 7}, {"v": 4}], "out": [8]},
                  {"op": "twobp::dropout", "args": [{"v": 8}, )" +
             dropout + R"(, {"random": 0}], "out": [9, 10]},
                  {"op": "aten::mean.dim", "args": [{"v": 9}, [0], false, null], "out": [11]},
                  {"op": "aten::mul.Scalar", "args": [{"v": 3}, 0.9], "out": [12]},
                  {"op": "aten::add.Tensor", "args": [{"v": 12}, {"v": 11}, 0.1], "out": [13]}],
      "evaluate": [{"op": "aten::t", "args": [{"v": 1}], "out": [5]},
                   {"op": "aten::addmm", "args": [{"v": 2}, {"v": 0}, {"v": 5}, 1, 1], "out": [6]},
                   {"op": "aten::relu", "args": [{"v": 6}], "out": [7]},
                   {"op": "aten::mul.Tensor", "args": [{"v": 7}, {"v": 4}], "out": [9]}],
      "outputs": [{"slot": 9, "gradient": 14}], "new_buffers": [{"index": 0, "slot": 13}],
      "backward_p1": [{"op": "aten::mul.Tensor", "args": [{"v": 14}, {"v": 10}], "out": [15]},
                      {"op": "aten::mul.Scalar", "args": [{"v": 15}, )" +
             std::to_string(1 / (1 - std::stod(dropout))) + R"(], "out": [16]},
                      {"op": "aten::mul.Tensor", "args": [{"v": 16}, {"v": 4}], "out": [17]},
                      {"op": "aten::threshold_backward", "args": [{"v": 17}, {"v": 7}, 0], "out": [18]},
                      {"op": "aten::sum.dim_IntList", "args": [{"v": 18}, [0], false, null], "out": [19]},
                      {"add_to": 1, "how": "sum", "args": [{"v": 19}]},
                      {"op": "aten::t", "args": [{"v": 5}], "out": [21]},
                      {"op": "aten::mm", "args": [{"v": 18}, {"v": 21}], "out": [22]}],
      "input_gradients": [)" +
             gradient +
             R"(],
      "backward_p2": [{"name": "middle.weight", "code": [{"op": "aten::t", "args": [{"v": 18}], "out": [23]},
                                                         {"add_to": 0, "how": "product", "args": [{"v": 23}, {"v": 0}]}]}]})";
    };
    const std::string with_gradient = middle_with(R"({"index": 0, "slot": 22})");
    const std::string after_frozen = middle_with("");
    const std::string last = R"({"slots": 30,
      "inputs": [{"from": "value", "index": 0, "slot": 0}, {"from": "field", "name": "target", "slot": 1},
                 {"from": "parameter", "index": 0, "slot": 2}, {"from": "parameter", "index": 1, "slot": 3},
                 {"from": "loss_weight", "slot": 4}],
      "forward": [{"op": "aten::t", "args": [{"v": 2}], "out": [5]},
                  {"op": "aten::addmm", "args": [{"v": 3}, {"v": 0}, {"v": 5}, 1, 1], "out": [6]},
                  {"op": "aten::sub.Tensor", "args": [{"v": 6}, {"v": 1}, 1], "out": [7]},
                  {"op": "aten::pow.Tensor_Scalar", "args": [{"v": 7}, 2], "out": [8]},
                  {"op": "aten::sum", "args": [{"v": 8}, null], "out": [9]},
                  {"op": "aten::mul.Tensor", "args": [{"v": 9}, {"v": 4}], "out": [10]}],
      "outputs": [{"slot": 10, "gradient": 11}], "new_buffers": [],
      "backward_p1": [{"op": "aten::mul.Tensor", "args": [{"v": 11}, {"v": 4}], "out": [12]},
                      {"op": "aten::mul.Scalar", "args": [{"v": 7}, 2], "out": [13]},
                      {"op": "aten::mul.Tensor", "args": [{"v": 13}, {"v": 12}], "out": [14]},
                      {"op": "aten::sum.dim_IntList", "args": [{"v": 14}, [0], false, null], "out": [15]},
                      {"add_to": 1, "how": "sum", "args": [{"v": 15}]},
                      {"op": "aten::mm", "args": [{"v": 14}, {"v": 2}], "out": [16]}],
      "input_gradients": [{"index": 0, "slot": 16}],
      "backward_p2": [{"name": "last.weight", "code": [{"op": "aten::t", "args": [{"v": 14}], "out": [17]},
                                                       {"add_to": 0, "how": "product", "args": [{"v": 17}, {"v": 0}]}]}]})";
    return "{" + fields + ", \"programs\": [" + first + ", " + with_gradient + ", " + last +
           (frozen_first ? ", " + after_frozen : "") +
           R"(], "targets": {"slots": 4, "inputs": [{"from": "field", "name": "target", "slot": 0}],
             "code": [{"op": "aten::select.int", "args": [{"v": 0}, 1, 0], "out": [1]},
                      {"op": "aten::ones_like", "args": [{"v": 1}, {"dtype": "int64"}, null, null, null, null], "out": [2]},
                      {"op": "aten::sum", "args": [{"v": 2}, null], "out": [3]}], "slot": 3}})";
  }

  graph::Tensors constants() const {
    const at::ScalarType type = dtype == "float64" ? at::kDouble : at::kFloat;
    return {{"scale", at::linspace(0.5, 1.5, kHidden, type)}};
  }

  std::shared_ptr<graph::Graph> graph() const { return graph::parse_graph(json(), "graph.json", constants()); }
};

}  // namespace twobp::test
