// The weights of a model and where they are used. A weight that several layers use is tied (parameters of one name).
#pragma once

#include <set>
#include <string>
#include <vector>

#include "twobp/nn/parameter.h"

namespace twobp {

class Pipeline;

struct WeightUse {
  Parameter* parameter = nullptr;  // null: on another process
  int layer = 0;                   // index in the model
  int stage = 0;
  int rank = 0;
  bool trainable = true;
  bool hidden = false;  // see ParameterGroups::rule_of
};

// The uses of one weight, in model order.
struct UsedWeight {
  std::vector<WeightUse> uses;

  // The rank's first parameter for the weight; it has the gradient. Null if the rank has none.
  Parameter* on(int rank) const;
  // The ranks that use a tied weight. Empty if the weight is not tied or not trained, or if `rank` is not one of them.
  std::set<int> ranks_of_tied(int rank) const;
};

struct WeightUses {
  // Throws Error if a tied weight has two shapes.
  explicit WeightUses(Pipeline& pipeline);

  std::vector<UsedWeight> all;      // in the order of their first use
  std::vector<Parameter*> weights;  // that this process holds, each once, in model order
  std::vector<std::string> names;   // of all weights of the model, by their parts
  int64_t numel = 0;                // of all weights of the model
};

}  // namespace twobp
