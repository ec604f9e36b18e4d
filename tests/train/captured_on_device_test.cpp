// Tests captured models (bundles) on the stand-in device. The bits are those of the same operators on a CPU, whatever
// the schedule. One bundle is written by hand. Python captures the others from modules, while the test runs.
#include <map>
#include <memory>

#include <gtest/gtest.h>
#include <torch/headeronly/version.h>

#include "tests/graph/mlp_bundle.h"
#include "tests/nn/device/stand_in_device.h"
#include "tests/train/helpers.h"
#include "tests/train/training.h"
#include "tests/train/worlds.h"
#include "twobp/data/text/python.h"
#include "twobp/nn/kernels/rows/operators.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/train/build_model.h"
#include "twobp/train/check_config.h"
#include "twobp/transport/world.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_same_bits;
using test::Outcome;
using test::TempFolder;

constexpr const char* kDevice = "privateuseone";
constexpr int kSteps = 3;

// y = W (2 x), then the squared error of c y. The first and the last layer have no parameters.
constexpr const char* kBare =
    R"({"format": "twobp graph", "version": 1, "torch": ")" TORCH_VERSION R"(", "module": "Bare", "dtype": "float32",
  "layers": [{"name": "double", "kind": 0, "parameters": [], "buffers": [], "constants": []},
             {"name": "linear", "kind": 1, "parameters": ["w"], "buffers": [], "constants": []},
             {"name": "loss", "kind": 2, "parameters": [], "buffers": [], "constants": ["c"]}],
  "kinds": ["double", "linear", "loss"],
  "parameters": {"w": {"dtype": "float32", "shape": [2, 3]}}, "buffers": {},
  "shapes": [{"fields": {"input": {"dtype": "float32", "shape": [4, 3]}, "target": {"dtype": "float32", "shape": [4, 2]}},
    "programs": [
      {"slots": 2, "inputs": [{"from": "field", "name": "input", "slot": 0}],
       "forward": [{"op": "aten::mul.Scalar", "args": [{"v": 0}, 2], "out": [1]}],
       "outputs": [{"slot": 1}], "new_buffers": [], "backward_p1": [], "input_gradients": [], "backward_p2": []},
      {"slots": 6, "inputs": [{"from": "value", "index": 0, "slot": 0}, {"from": "parameter", "index": 0, "slot": 1}],
       "forward": [{"op": "aten::t", "args": [{"v": 1}], "out": [2]},
                   {"op": "aten::mm", "args": [{"v": 0}, {"v": 2}], "out": [3]}],
       "outputs": [{"slot": 3, "gradient": 4}], "new_buffers": [], "backward_p1": [], "input_gradients": [],
       "backward_p2": [{"name": "w", "code": [{"op": "aten::t", "args": [{"v": 4}], "out": [5]},
                                              {"add_to": 0, "how": "product", "args": [{"v": 5}, {"v": 0}]}]}]},
      {"slots": 14, "inputs": [{"from": "value", "index": 0, "slot": 0}, {"from": "field", "name": "target", "slot": 1},
                               {"from": "loss_weight", "slot": 2}, {"from": "constant", "index": 0, "slot": 3}],
       "forward": [{"op": "aten::sub.Tensor", "args": [{"v": 0}, {"v": 1}, 1], "out": [4]},
                   {"op": "aten::mul.Tensor", "args": [{"v": 4}, {"v": 3}], "out": [5]},
                   {"op": "aten::pow.Tensor_Scalar", "args": [{"v": 5}, 2], "out": [6]},
                   {"op": "aten::sum", "args": [{"v": 6}, null], "out": [7]},
                   {"op": "aten::mul.Tensor", "args": [{"v": 7}, {"v": 2}], "out": [8]}],
       "outputs": [{"slot": 8, "gradient": 9}], "new_buffers": [],
       "backward_p1": [{"op": "aten::mul.Tensor", "args": [{"v": 9}, {"v": 2}], "out": [10]},
                       {"op": "aten::mul.Scalar", "args": [{"v": 5}, 2], "out": [11]},
                       {"op": "aten::mul.Tensor", "args": [{"v": 11}, {"v": 3}], "out": [12]},
                       {"op": "aten::mul.Tensor", "args": [{"v": 12}, {"v": 10}], "out": [13]}],
       "input_gradients": [{"index": 0, "slot": 13}], "backward_p2": []}],
    "targets": {"count": 4}}]})";

// The folders of the bundles, which are made when they are asked for.
class Bundles {
 public:
  static Bundles& all() {
    static Bundles bundles;
    return bundles;
  }

  // Empty, or the reason why there is no such bundle.
  std::string make(const std::string& name) {
    if (made_.contains(name)) return made_[name];
    if (name == "mlp" || name == "bare") return made_[name] = write_by_hand(name);
    return made_[name] = capture(name);
  }
  std::string path(const std::string& name) const { return folder_.path(name); }

 private:
  std::string write_by_hand(const std::string& name) {
    test::MlpGraph mlp;
    mlp.middle = 5;
    const TempFolder made;
    test::write_bundle(made, mlp);
    if (name == "bare") {
      made.write("bundle/graph.json", kBare);
      write_safetensors(made.path("bundle/model.safetensors"), {{"w", test::random_tensor({2, 3}, 1)}}, {});
      write_safetensors(made.path("bundle/constants.safetensors"), {{"c", test::random_tensor({2}, 2)}}, {});
    }
    std::filesystem::copy(made.path(""), path(name), std::filesystem::copy_options::recursive);
    return {};
  }

  std::string capture(const std::string& name) {
    if (!python_) {
      const std::string script = test::read_file(TWOBP_SOURCE_DIR "/tests/train/captured_bundles.py");
      python_ = std::make_unique<PythonProcess>("captured_bundles.py", script,
                                                std::vector<std::string>{TWOBP_PYTHON_PACKAGES, path("")},
                                                /*timeout=*/600);
      has_packages_ = python_->read_line();
    }
    if (has_packages_ != "ok") return has_packages_;
    python_->write(name + "\n");
    const std::string answer = python_->read_line();
    return answer == "ok" ? std::string() : answer;
  }

  TempFolder folder_;
  std::map<std::string, std::string> made_;
  std::unique_ptr<PythonProcess> python_;
  std::string has_packages_;
};

Config config_of(const std::string& model, const char* device, int ranks = 1) {
  Config config;
  config.model.from = Bundles::all().path(model + "/bundle");
  config.model.type = read_hf_config(config.model.from);
  config.data.arrays = Bundles::all().path(model + "/data");
  config.data.sequence = 16;
  config.data.held_out = 0.2;
  config.pipeline.device = device;
  config.pipeline.ranks = ranks;
  config.pipeline.schedule = "gpipe";
  config.pipeline.p2 = "off";
  config.pipeline.micro_batches = 4;
  config.pipeline.micro_batch_size = model == "mlp" || model == "bare" ? test::kSamples : 2;
  config.pipeline.pin = false;
  config.pipeline.timeout = 60;
  config.optimizer.lr = 1e-2;
  config.optimizer.schedule = "constant";
  config.train.steps = kSteps;
  config.train.seed = 7;
  config.train.clip_norm = 0.5;
  return config;
}

Outcome train(const Config& config) {
  Trainer trainer(config);
  return test::train_until(trainer, kSteps);
}

template <typename Run>
auto by_operators_on_a_cpu(const Run& run) {
  const OperatorsEverywhere operators;
  return run();
}

struct How {
  int ranks;
  const char* schedule;
  const char* p2;
  const char* cap;
  const char* recompute = "none";
};

class Captured : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const std::string why = Bundles::all().make(GetParam());
    if (why.starts_with("skip")) GTEST_SKIP() << why;
    ASSERT_EQ(why, "");
  }

  static Config config(const char* device, int ranks = 1) { return config_of(GetParam(), device, ranks); }
  static bool narrow() { return std::string_view(GetParam()).ends_with("bf16"); }
  // Products of 16-bit types round otherwise on a CPU.
  static Outcome expected() {
    if (narrow()) return train(config(kDevice));
    return by_operators_on_a_cpu([] { return train(config("cpu")); });
  }
};

TEST_P(Captured, TrainsToTheBitsOfTheOperatorsOnACpu) {
  const Outcome expected = Captured::expected();
  const Outcome kernels = train(config("cpu"));
  for (size_t i = 0; i < expected.losses.size(); ++i) {
    EXPECT_NEAR(kernels.losses[i], expected.losses[i], (narrow() ? 2e-2 : 1e-4) * kernels.losses[i]);
  }
  for (const How& how : {How{1, "gpipe", "off", "auto"}, How{1, "1f1b", "fill", "auto"}, How{2, "1f1b", "off", "auto"},
                         How{2, "1f1b", "fill", "auto"}, How{2, "1f1b", "fill", "0"}, How{3, "gpipe", "end", "0"},
                         How{3, "zb-h1", "placed", "auto"}, How{2, "1f1b", "fill", "auto", "both"}}) {
    Config config = Captured::config(kDevice, how.ranks);
    config.pipeline.schedule = how.schedule;
    config.pipeline.p2 = how.p2;
    config.pipeline.memory_cap = how.cap;
    config.pipeline.recompute = {how.recompute};
    Trainer trainer(config);
    for (const Parameter* parameter : trainer.weights())
      ASSERT_EQ(parameter->value.device().type(), at::kPrivateUse1) << parameter->name();
    expect_same_bits(
        expected, test::train_until(trainer, kSteps),
        concat(how.ranks, " ranks, ", how.schedule, ", p2 ", how.p2, ", cap ", how.cap, ", recompute ", how.recompute));
  }
}

// With evaluation at the end.
TEST_P(Captured, TrainsInReplicasToTheSameBits) {
  const auto run = [](const char* device, int ranks) {
    Config config = Captured::config(device, ranks);
    config.pipeline.data_parallel = 2;
    config.pipeline.micro_batches = 2;
    config.pipeline.schedule = "1f1b";
    config.pipeline.p2 = "fill";
    std::vector<Device> devices;
    for (int rank = 0; rank < 2 * ranks && device == kDevice; ++rank) devices.push_back(test::stand_in_device(rank));
    return test::run_in(make_in_process_worlds(2, ranks, 0, devices), config, kSteps);
  };
  const test::RunOutcome expected = narrow() ? run(kDevice, 1) : by_operators_on_a_cpu([&] { return run("cpu", 1); });
  EXPECT_EQ(expected.evaluations.size(), 1u);
  for (const int ranks : {1, 2}) test::expect_same_run(expected, run(kDevice, ranks), concat(ranks, " ranks"));
}

TEST_P(Captured, EvaluatesToTheSameBits) {
  const auto evaluation = [](const char* device) {
    Trainer trainer(Captured::config(device, 2));
    trainer.step();
    return trainer.evaluate().value();
  };
  const auto there = evaluation(kDevice);
  if (narrow()) {
    EXPECT_NEAR(there.loss, evaluation("cpu").loss, 2e-2 * there.loss);
    return;
  }
  EXPECT_EQ(there, by_operators_on_a_cpu([&] { return evaluation("cpu"); }));
}

// The host reads the losses once, and each rank's squares. It waits for no copy, so it runs ahead.
TEST_P(Captured, TheHostDoesNotWaitInAMicroBatch) {
  Config config = Captured::config(kDevice, 2);
  config.pipeline.schedule = "1f1b";
  config.pipeline.p2 = "fill";
  Trainer trainer(config);
  trainer.step();
  const int reads = test::host_reads();
  const int copies = test::blocking_copies();
  const StepResult result = trainer.step();
  const int ranks_with_weights = std::string_view(GetParam()) == "bare" ? 1 : 2;
  EXPECT_EQ(test::host_reads() - reads, 1 + ranks_with_weights);
  EXPECT_EQ(test::blocking_copies(), copies);
  for (const MemoryUse& rank : result.report.rank_memory)
    EXPECT_LT(rank.held(), 4096) << "at most the constants are held after a step";
}

INSTANTIATE_TEST_SUITE_P(OnDevice, Captured,
                         ::testing::Values("mlp", "bare", "gpt2", "llama", "masked", "conv", "noise", "lstm",
                                           "llama_bf16"),
                         [](const auto& info) { return std::string(info.param); });

class OneCaptured : public ::testing::Test {
 protected:
  static std::string why_not(const char* model) { return Bundles::all().make(model); }
};

TEST_F(OneCaptured, TrainsInSlices) {
  if (const std::string why = why_not("llama"); !why.empty()) GTEST_SKIP() << why;
  const auto run = [](const char* device, int ranks, const char* p2) {
    Config config = config_of("llama", device, ranks);
    config.pipeline.slices = 2;
    config.pipeline.schedule = "1f1b";
    config.pipeline.p2 = p2;
    return train(config);
  };
  const Outcome expected = by_operators_on_a_cpu([&] { return run("cpu", 1, "off"); });
  expect_same_bits(expected, run(kDevice, 1, "fill"), "one rank");
  expect_same_bits(expected, run(kDevice, 2, "fill"), "two ranks");
}

// From the third step on, a step is one call.
TEST_F(OneCaptured, TrainsAsAGraph) {
  for (const char* model : {"llama", "conv"}) {
    if (const std::string why = why_not(model); !why.empty()) GTEST_SKIP() << why;
    for (const int ranks : {1, 2}) {
      Config config = config_of(model, kDevice, ranks);
      config.pipeline.schedule = "1f1b";
      config.pipeline.p2 = "fill";
      const Outcome expected = train(config);
      config.pipeline.graphs = true;
      const std::vector<Device> devices(ranks, test::stand_in_device(9));
      const int replays = test::replays();
      Trainer trainer(config, std::move(make_in_process_worlds(1, ranks, 0, devices).front()));
      expect_same_bits(expected, test::train_until(trainer, kSteps), concat(model, ", ", ranks, " ranks"));
      EXPECT_EQ(test::replays() - replays, kSteps - 1) << "all steps but the first";
    }
  }
}

// Otherwise every step would have the masks of the recorded one.
TEST_F(OneCaptured, IsNoGraphIfItDrawsRandomNumbers) {
  for (const auto& [model, drawn] :
       {std::pair{"mlp", "twobp::dropout in layer 'middle.0'"}, {"noise", "aten::bernoulli"}}) {
    if (const std::string why = why_not(model); !why.empty()) GTEST_SKIP() << why;
    Config config = config_of(model, "cuda");
    config.pipeline.graphs = true;
    test::expect_error([&] { check_config(config); }, {"pipeline.graphs", "model.type \"captured\"", drawn});
  }
}

TEST_F(OneCaptured, HasMeasuredCosts) {
  ASSERT_EQ(why_not("mlp"), "");
  MeasureOptions options;
  options.seconds = 0.01;
  const CostModel costs = measure_costs(config_of("mlp", kDevice), options);
  EXPECT_EQ(costs.kinds.size(), 3u);
  for (const auto& [kind, cost] : costs.kinds) EXPECT_GT(cost.at_size.front().forward, 0) << kind;
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
