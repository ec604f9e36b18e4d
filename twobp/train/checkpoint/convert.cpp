#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "twobp/core/check.h"
#include "twobp/train/build_model.h"
#include "twobp/train/checkpoint/checkpoint.h"
#include "twobp/train/checkpoint/checkpoint_folder.h"

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

// The names of the tensors of each part, in order. A tensor goes to the part in which its middle lies.
std::vector<std::vector<std::string>> spread(const Checkpoint& checkpoint, File file, int parts) {
  uint64_t bytes = 0;
  for (const std::string& name : checkpoint.names(file)) bytes += checkpoint.bytes(file, name);
  std::vector<std::vector<std::string>> spread(parts);
  uint64_t before = 0;
  for (const std::string& name : checkpoint.names(file)) {
    const uint64_t size = checkpoint.bytes(file, name);
    const double middle = static_cast<double>(before) + static_cast<double>(size) / 2;
    const auto part = static_cast<int>(middle / static_cast<double>(std::max<uint64_t>(bytes, 1)) * parts);
    spread[std::min(part, parts - 1)].push_back(name);
    before += size;
  }
  return spread;
}

NamedTensors read(const Checkpoint& checkpoint, File file, const std::vector<std::string>& names) {
  NamedTensors tensors;
  for (const std::string& name : names) tensors.emplace_back(name, checkpoint.read(file, name));
  return tensors;
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

void reshard(const Checkpoint& checkpoint, const std::string& directory, int parts) {
  TWOBP_CHECK(parts >= 1, "a checkpoint has at least one part, not ", parts);
  CheckpointFolder first(directory, std::numeric_limits<int64_t>::max(), parts);
  TWOBP_CHECK(first.steps().empty(), directory, " holds checkpoints already: use another folder");
  const auto weights = spread(checkpoint, File::kWeights, parts);
  const auto optimizer = spread(checkpoint, File::kOptimizer, parts);
  const auto frozen = spread(checkpoint, File::kFrozen, parts);
  for (int part = parts - 1; part >= 0; --part) {
    const auto add = [&](CheckpointFolder& folder) {
      folder.add({checkpoint.state(), read(checkpoint, File::kWeights, weights[part]),
                  read(checkpoint, File::kOptimizer, optimizer[part]), read(checkpoint, File::kFrozen, frozen[part])});
    };
    if (part == 0) {
      add(first);
    } else {
      CheckpointFolder other(directory, {part, parts}, first.run_id());
      add(other);
    }
  }
}

}  // namespace twobp
