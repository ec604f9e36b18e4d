#include <map>
#include <memory>
#include <set>
#include <vector>

#include "twobp/core/check.h"
#include "twobp/train/build_model.h"
#include "twobp/train/checkpoint/checkpoint.h"

namespace twobp {
namespace {

using File = CheckpointFile;

// Packs the parts of one parameter again; of their running means if there are any.
at::Tensor master_of(const Parameter& parameter, const Checkpoint& checkpoint, std::set<std::string>& known) {
  std::vector<at::Tensor> rows;
  std::vector<int64_t> shape = parameter.sizes();
  for (const ParameterPart& part : parameter.parts()) {
    const File file = checkpoint.contains(File::kFrozen, part.name) ? File::kFrozen : File::kWeights;
    const std::string mean = part.name + ".average";
    TWOBP_CHECK(checkpoint.contains(file, part.name), checkpoint.folder().string(), " has no ", part.name,
                ", which the model of its configuration has");
    const bool averaged = checkpoint.contains(File::kOptimizer, mean);
    rows.push_back(averaged ? checkpoint.read(File::kOptimizer, mean) : checkpoint.read(file, part.name));
    if (!shape.empty()) shape[0] = part.rows;
    const bool flat = averaged && !checkpoint.whole(File::kOptimizer, mean);
    if (flat && rows.back().numel() == c10::multiply_integers(shape)) rows.back() = rows.back().view(shape);
    TWOBP_CHECK(rows.back().sizes() == at::IntArrayRef(shape), checkpoint.folder().string(), ": ", part.name, " is ",
                rows.back().sizes(), ", expected ", at::IntArrayRef(shape));
    known.insert(part.name);
  }
  return rows.size() == 1 ? rows.front() : at::cat(rows);
}

}  // namespace

void save_model_of(const Checkpoint& checkpoint, const Config& config, const std::string& directory,
                   const SaveModelOptions& options) {
  const ModelSpec model = build_model(config);
  std::vector<std::unique_ptr<Layer>> layers;
  std::map<std::string, Parameter*> weights;  // tied weights only once
  std::vector<Parameter*> in_order;
  std::set<std::string> known;
  for (const LayerSpec& spec : model.layers) {
    layers.push_back(spec.make());  // allocates nothing
    for (Parameter* parameter : parameters_of(*layers.back())) {
      if (parameter->parts().empty() || !weights.try_emplace(parameter->name(), parameter).second) continue;
      parameter->master = master_of(*parameter, checkpoint, known);
      in_order.push_back(parameter);
    }
  }
  checkpoint.check_no_others(File::kWeights, known);
  checkpoint.check_no_others(File::kFrozen, known);
  save_model(directory, config.model, config.data.sequence, in_order, options);
}

}  // namespace twobp
