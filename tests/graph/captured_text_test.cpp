// Tests a captured model of tokens that trains on text, and the gradient of an embedding.
#include <filesystem>

#include <gtest/gtest.h>
#include <torch/headeronly/version.h>

#include "tests/graph/plain_sgd.h"
#include "tests/train/helpers.h"
#include "tests/train/training.h"
#include "twobp/files/safetensors.h"
#include "twobp/models/hf_config.h"

namespace twobp::TWOBP_FILE {
namespace {

// The loss is the sum of the embeddings of all tokens, divided by the number of targets.
constexpr const char* kGraph =
    R"({"format": "twobp graph", "version": 1, "torch": ")" TORCH_VERSION R"(", "module": "Sum", "dtype": "float32",
  "layers": [{"name": "sum", "kind": 0, "parameters": ["table"], "buffers": [], "constants": []}], "kinds": ["sum"],
  "parameters": {"table": {"dtype": "float32", "shape": [256, 3]}}, "buffers": {},
  "shapes": [{"fields": {"input_ids": {"dtype": "int64", "shape": [2, 8]}, "labels": {"dtype": "int64", "shape": [2, 8]}},
    "programs": [{"slots": 10,
      "inputs": [{"from": "field", "name": "input_ids", "slot": 0}, {"from": "parameter", "index": 0, "slot": 1},
                 {"from": "loss_weight", "slot": 2}],
      "forward": [{"op": "aten::reshape", "args": [{"v": 0}, [-1, 8]], "out": [9]},
                  {"op": "aten::embedding", "args": [{"v": 1}, {"v": 9}, -1, false, false], "out": [3]},
                  {"op": "aten::sum", "args": [{"v": 3}, null], "out": [4]},
                  {"op": "aten::mul.Tensor", "args": [{"v": 4}, {"v": 2}], "out": [5]}],
      "outputs": [{"slot": 5, "gradient": 6}], "new_buffers": [],
      "backward_p1": [{"op": "aten::mul.Tensor", "args": [{"v": 6}, {"v": 2}], "out": [7]},
                      {"op": "aten::expand", "args": [{"v": 7}, [2, 8, 3], false], "out": [8]}],
      "input_gradients": [],
      "backward_p2": [{"name": "table", "code": [{"add_to": 0, "how": "embedding", "args": [{"v": 8}, {"v": 0}, 32]}]}]}],
    "targets": {"slots": 4, "inputs": [{"from": "field", "name": "labels", "slot": 0}],
      "code": [{"op": "aten::slice.Tensor", "args": [{"v": 0}, 1, 1, null, 1], "out": [1]},
               {"op": "aten::ne.Scalar", "args": [{"v": 1}, -100], "out": [2]},
               {"op": "aten::sum", "args": [{"v": 2}, null], "out": [3]}], "slot": 3}}]})";

TEST(CapturedText, TrainsOnBytes) {
  const test::TempFolder folder;
  std::filesystem::create_directory(folder.path("bundle"));
  folder.write("bundle/graph.json", kGraph);
  write_safetensors(folder.path("bundle/model.safetensors"), {{"table", at::ones({256, 3})}}, {});
  // There are three samples of eight bytes. One micro-batch of two samples is used. A space is padding.
  folder.write("text.txt", "aabbccd dcba  zzsome more");
  Config config;
  config.model.from = folder.path("bundle");
  config.model.type = read_hf_config(config.model.from);
  config.data.text = folder.path("text.txt");
  config.data.sequence = 8;
  config.data.shuffle = false;
  config.data.held_out = 0;
  config.pipeline.ranks = 1;
  config.pipeline.micro_batches = 1;
  config.pipeline.micro_batch_size = 2;
  config.pipeline.pin = false;
  test::use_plain_sgd(config);
  config.train.steps = 1;
  check_config(config);
  Trainer trainer(config);
  EXPECT_EQ(trainer.data().train->size(), 2);
  const StepResult result = trainer.step();
  EXPECT_NEAR(result.loss, 48.0 / 14, 1e-6);  // 14 targets, because the module shifts the labels
  EXPECT_EQ(result.tokens, 16);
  const at::Tensor& table = trainer.weights().front()->value;
  const auto moved = [&](char c) { return 1 - table[c][0].item<double>(); };
  EXPECT_NEAR(moved('a'), 3.0 / 14, 1e-6);
  EXPECT_NEAR(moved('d'), 2.0 / 14, 1e-6);
  EXPECT_NEAR(moved('z'), 2.0 / 14, 1e-6);
  EXPECT_EQ(moved(' '), 0);
  EXPECT_EQ(moved('s'), 0);
  config.data.sequence = 16;
  test::expect_error([&] { check_config(config); }, {"data.sequence is 16", "captured with sequences of 8"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
