// A model as a list of layers that can be cut into stages: their names, their kinds, and how to make each.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "twobp/nn/context.h"
#include "twobp/nn/layer.h"

namespace twobp {

struct LayerSpec {
  std::string name;  // "model.layers.0.attention", for messages
  std::string kind;  // layers of one kind cost the same: "attention", "mlp", "head"
  std::function<std::unique_ptr<Layer>()> make;
};

// Parameters of the same name in different layers are tied: one weight, several uses.
struct ModelSpec {
  std::string input_field;  // the batch's field that is the first layer's input; empty: that layer reads the batch
                            // itself
  std::vector<LayerSpec> layers;
  int first_trainable = 0;    // earlier layers have no backward pass: see freeze.h
  bool bf16_stash = false;    // float32 tensors that only W reads are kept in bfloat16
  TargetCount count_targets;  // of a micro-batch; empty: its counted labels
};

// The number of uses of each weight, by name. Makes every layer once, which allocates nothing.
std::map<std::string, int> uses_of_weights(const ModelSpec& model);
// The names of weights with several uses.
std::set<std::string> tied_weights(const ModelSpec& model);

}  // namespace twobp
