// Writes the captured MLP as a bundle, with data for it.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "tests/graph/mlp_graph.h"
#include "tests/train/helpers.h"
#include "twobp/core/check.h"
#include "twobp/core/random.h"
#include "twobp/files/safetensors.h"
#include "twobp/models/hf_config.h"
#include "twobp/train/config.h"

namespace twobp::test {

inline constexpr int kMlpSamples = 40;

inline std::vector<float> random_floats(int64_t count, uint64_t seed) {
  SplitMix64 random(seed);
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(static_cast<float>(bounded(random, 2001)) / 1000.0F - 1);
  return values;
}

inline at::Tensor random_tensor(at::IntArrayRef sizes, uint64_t seed) {
  std::vector<float> values = random_floats(c10::multiply_integers(sizes), seed);
  return at::from_blob(values.data(), sizes, at::kFloat).clone();
}

// Writes the folders bundle and data.
inline void write_bundle(const TempFolder& folder, const MlpGraph& mlp) {
  std::filesystem::create_directory(folder.path("bundle"));
  std::filesystem::create_directory(folder.path("data"));
  folder.write("bundle/graph.json", mlp.json());
  NamedTensors weights;
  const auto graph = mlp.graph();
  uint64_t seed = 1;
  for (const auto& [name, parameter] : graph->description().parameters)
    weights.emplace_back(name, random_tensor(parameter.type.sizes, seed++));
  for (const auto& [name, type] : graph->description().buffers)
    weights.emplace_back(name, random_tensor(type.sizes, seed++));
  write_safetensors(folder.path("bundle/model.safetensors"), weights, {{"format", "pt"}});
  const graph::Tensors constants = mlp.constants();
  write_safetensors(folder.path("bundle/constants.safetensors"), {constants.begin(), constants.end()}, {});
  folder.write("bundle/notes.txt", "of the module");
  folder.write("data/input.npy", npy_file("<f4", concat("(", kMlpSamples, ", 3)"), random_floats(kMlpSamples * 3, 50)));
  folder.write("data/target.npy",
               npy_file("<f4", concat("(", kMlpSamples, ", 2)"), random_floats(kMlpSamples * 2, 51)));
}

// The model and the data of a run become those of the folder.
inline void use_bundle(Config& config, const TempFolder& folder) {
  config.model = {};
  config.model.from = folder.path("bundle");
  config.model.type = read_hf_config(config.model.from);
  config.data.synthetic = "";
  config.data.arrays = folder.path("data");
}

}  // namespace twobp::test
