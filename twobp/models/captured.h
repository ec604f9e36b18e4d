// The model type "captured": a torch.nn.Module that Python captured as a bundle (docs/bundle.md). The bundle, which
// model.from names, says what it computes.
#pragma once

#include <memory>
#include <string>

#include "twobp/models/model_type.h"

namespace twobp {

namespace graph {
class Graph;
}

struct CapturedOptions {
  static constexpr const char* kType = "captured";
  std::shared_ptr<const graph::Graph> graph;  // null: none was given
  std::string program;  // the checksum of its file, for the comparison of processes and of checkpoints
  std::string weights;  // folder of the weights; empty: model.from
};

// The layers of a captured module.
ModelSpec captured(const std::shared_ptr<const graph::Graph>& graph);

// Whether the folder is a bundle.
bool is_bundle(const std::string& folder);
// Throws Error as read_graph does.
ModelOptions read_bundle(const std::string& folder);

ModelType captured_type();

}  // namespace twobp
