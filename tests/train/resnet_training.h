// This file has helpers of the tests of ResNet's training: a tiny model and batches for it.
#pragma once

#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "tests/train/training.h"
#include "twobp/data/synthetic_dataset.h"
#include "twobp/pipeline/pipeline.h"

namespace twobp::test {

inline constexpr int kResnetLayers = 6;  // stem, 2 + 2 blocks, head
inline constexpr int64_t kImageSize = 9;

inline Config tiny_resnet(const std::string& block, bool small_images = true) {
  Config config = tiny_config();
  ResnetOptions resnet;
  resnet.block = block;
  resnet.small_images = small_images;
  resnet.channels = 2;
  resnet.classes = 5;
  resnet.stem = 6;
  resnet.depths = {2, 2};
  resnet.widths = {8, 12};
  config.model.type = resnet;
  config.data.synthetic = "images";
  config.data.image_size = small_images ? kImageSize : 32;
  config.optimizer.type = "sgd";
  config.optimizer.lr = 0.05;
  config.optimizer.momentum = 0.9;
  return config;
}

inline std::vector<Batch> image_batches(const Config& config, int steps, int micro_batches, int64_t samples = 3) {
  const auto images =
      synthetic_images(1 << 20, config.model.input().channels, config.data.image_size, config.model.input().classes, 5);
  std::vector<Batch> batches;
  int64_t next = 0;
  for (int step = 0; step < steps; ++step) {
    std::vector<int64_t> indices(static_cast<size_t>(micro_batches * samples));
    std::iota(indices.begin(), indices.end(), next);
    next += micro_batches * samples;
    batches.push_back(read_batch(*images, indices, 0, samples));
  }
  return batches;
}

inline std::map<std::string, at::Tensor> copies_by_name(const std::vector<Parameter*>& parameters,
                                                        bool buffers_only = false) {
  std::map<std::string, at::Tensor> copies;
  for (const Parameter* parameter : parameters) {
    if (!buffers_only || parameter->is_buffer()) copies[parameter->name()] = parameter->master.clone();
  }
  return copies;
}

inline void expect_same(const std::map<std::string, at::Tensor>& actual,
                        const std::map<std::string, at::Tensor>& expected, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (const auto& [name, value] : expected) {
    ASSERT_TRUE(actual.contains(name)) << what << ": " << name;
    EXPECT_TRUE(same_bits(actual.at(name), value)) << what << ": " << name;
  }
}

}  // namespace twobp::test
