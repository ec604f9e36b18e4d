// The model type "captured": a torch.nn.Module that Python captured as a bundle (docs/bundle.md). The bundle, which
// model.from names, says what it computes.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

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
  // Of the micro-batches of the run: their sizes by name. Empty: those of the first shape.
  std::map<std::string, std::vector<int64_t>> sizes{};
};

// The layers of a captured module.
ModelSpec captured(const std::shared_ptr<const graph::Graph>& graph);

// Whether the folder is a bundle.
bool is_bundle(const std::string& folder);
// Throws Error as read_graph does.
ModelOptions read_bundle(const std::string& folder);

ModelType captured_type();

// Whether the model is captured and has programs for many shapes of micro-batches.
bool serves_many(const ModelOptions& options);

// Hugging Face models for which this program has no layers. A Python process captures such a model once, as a bundle
// that is kept in the cache folder.

// The dtype ("int64" or "float32") and the sizes of each field of a micro-batch, by name.
using CaptureFields = std::map<std::string, std::pair<std::string, std::vector<int64_t>>>;

// The fields of micro-batches from a folder of arrays, one for each field. Throws Error for a folder without any, an
// array without samples, and as NpyArray does.
CaptureFields fields_of_arrays(const std::string& folder, int64_t micro_batch);
// input_ids and labels.
CaptureFields fields_of_tokens(int64_t micro_batch, int64_t sequence);
// Lets the model's input be micro-batches of these sizes, if it has programs for them.
void take_fields(ModelOptions& options, const CaptureFields& fields);

// Whether the folder holds a model for which this program has no layers: its config.json has an unknown model_type or
// class. False if there is no config.json.
bool needs_capture(const std::string& directory);

// Captures the model. `arrays`: a folder whose first samples serve as the example; empty: random tokens. `cache` is
// data.cache, `precision` train.precision. The bundle is reused, without Python, while the folder, the fields, the
// precision and the code that it was made by (torch, transformers, twobp) are the same; not with TWOBP_CACHE=off in the
// environment. Runs that need the same bundle wait for each other. Throws Error if Python or a package is missing, the
// model cannot be captured, with the reason, or the cache folder cannot be written.
ModelOptions capture_model(const std::string& directory, const CaptureFields& fields, const std::string& arrays,
                           const std::string& precision, const std::string& cache);

}  // namespace twobp
