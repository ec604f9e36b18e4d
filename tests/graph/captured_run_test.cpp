// Tests whole runs from a bundle. The bits do not depend on schedules, cuts, ranks and recomputation. Also tests a run
// that is stopped and resumed, and a saved bundle that is loaded again.
#include <filesystem>
#include <sys/stat.h>

#include <gtest/gtest.h>

#include "tests/graph/mlp_bundle.h"
#include "tests/graph/plain_sgd.h"
#include "tests/train/helpers.h"
#include "tests/train/training.h"
#include "tests/train/worlds.h"
#include "twobp/files/safetensors.h"
#include "twobp/models/hf_config.h"
#include "twobp/train/checkpoint/checkpointer.h"
#include "twobp/train/weights/save_model.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_same_bits;
using test::MlpGraph;
using test::Outcome;
using test::TempFolder;
using test::write_bundle;

constexpr int kSteps = 5;

class CapturedRun : public ::testing::Test {
 protected:
  void SetUp() override {
    MlpGraph mlp;
    mlp.middle = 5;
    write_bundle(folder_, mlp);
  }

  Config config() const {
    Config config;
    config.model.from = folder_.path("bundle");
    config.model.type = read_hf_config(config.model.from);
    config.data.arrays = folder_.path("data");
    config.data.held_out = 0.2;
    config.pipeline.ranks = 1;
    config.pipeline.schedule = "gpipe";
    config.pipeline.p2 = "off";
    config.pipeline.micro_batches = 4;
    config.pipeline.micro_batch_size = test::kSamples;
    config.pipeline.pin = false;
    config.pipeline.timeout = 60;
    config.optimizer.lr = 1e-2;
    config.train.steps = kSteps;
    config.train.seed = 7;
    config.train.clip_norm = 0.5;
    return config;
  }

  static Outcome train(const Config& config) {
    check_config(config);
    Trainer trainer(config);
    return test::train_until(trainer, kSteps);
  }

  TempFolder folder_;
};

TEST_F(CapturedRun, HasTheSameBitsOverSchedulesAndRanks) {
  const Outcome expected = train(config());
  EXPECT_LT(expected.losses.back(), expected.losses.front());
  for (const int ranks : {1, 2, 3}) {
    for (const auto& [schedule, p2, batching] : {std::tuple{"1f1b", "fill", "loop"},
                                                 {"1f1b", "off", "loop"},
                                                 {"zb-v", "fill", "loop"},
                                                 {"gpipe", "end", "concat"}}) {
      Config other = config();
      other.pipeline.ranks = ranks;
      other.pipeline.schedule = schedule;
      other.pipeline.p2 = p2;
      other.pipeline.p2_batching = batching;
      expect_same_bits(expected, train(other), concat(schedule, " ", p2, " ", batching, ", ", ranks, " ranks"));
      if (std::string(schedule) != "1f1b" || std::string(p2) != "fill") continue;
      other.pipeline.recompute = {"both"};
      expect_same_bits(expected, train(other), concat("recompute both, ", ranks, " ranks"));
    }
  }
}

TEST_F(CapturedRun, ContinuesFromACheckpointOnOtherRanks) {
  const Outcome expected = train(config());
  Config first = config();
  first.save.checkpoints = folder_.path("checkpoints");
  first.save.every = 1;
  {
    Trainer trainer(first);
    Checkpointer checkpointer(first.save, /*resume=*/false);
    for (int i = 0; i < 2; ++i) {
      trainer.step();
      checkpointer.after_step(trainer);
    }
    checkpointer.finish(trainer);
  }
  Config second = first;
  second.pipeline.ranks = 3;
  second.pipeline.schedule = "1f1b";
  second.pipeline.p2 = "fill";
  Trainer trainer(second);
  Checkpointer checkpointer(second.save, /*resume=*/true);
  checkpointer.resume(trainer);
  ASSERT_EQ(trainer.steps_done(), 2);
  {
    MlpGraph changed;
    changed.middle = 5;
    changed.dropout = "0.5";
    const TempFolder elsewhere;
    write_bundle(elsewhere, changed);
    Config third = second;
    third.model.from = elsewhere.path("bundle");
    third.model.type = read_hf_config(third.model.from);
    third.save.checkpoints = folder_.path("copy");
    std::filesystem::copy(second.save.checkpoints, third.save.checkpoints, std::filesystem::copy_options::recursive);
    Trainer other(third);
    Checkpointer of_another(third.save, /*resume=*/true);
    test::expect_error([&] { of_another.resume(other); }, {"cannot resume", "model.program is"});
  }
  const Outcome rest = test::train_until(trainer, kSteps);
  ASSERT_EQ(rest.weights.size(), expected.weights.size());
  for (size_t i = 0; i < rest.weights.size(); ++i)
    EXPECT_TRUE(test::same_bits(expected.weights[i], rest.weights[i])) << i;
}

// There are two replicas, with evaluation and steps that overlap.
TEST_F(CapturedRun, HasTheSameBitsOverTheRanksOfReplicas) {
  Config two = config();
  two.pipeline.data_parallel = 2;
  two.pipeline.micro_batches = 2;
  two.pipeline.run_ahead = "on";
  two.pipeline.schedule = "zb-v";
  two.pipeline.p2 = "fill";
  std::vector<test::RunOutcome> outcomes;
  for (const int ranks : {1, 2}) {
    two.pipeline.ranks = ranks;
    outcomes.push_back(test::run_in(make_in_process_worlds(2, ranks, 0), two, kSteps));
  }
  test::expect_same_run(outcomes[0], outcomes[1], "two ranks");
  ASSERT_EQ(outcomes[0].evaluations.size(), 1u);
}

// This computes the loss and every gradient of one step with autograd.
TEST_F(CapturedRun, HasTheLossOfAutograd) {
  MlpGraph mlp;
  mlp.middle = 2;
  mlp.dropout = "0.0";
  const TempFolder folder;
  write_bundle(folder, mlp);
  Config one = config();
  one.model.from = folder.path("bundle");
  one.model.type = read_hf_config(one.model.from);
  test::use_plain_sgd(one);
  one.pipeline.ranks = 2;
  one.pipeline.schedule = "1f1b";
  one.pipeline.p2 = "fill";
  Trainer trainer(one);
  std::map<std::string, at::Tensor> weights;
  const SafetensorsFile file(folder.path("bundle/model.safetensors"));
  for (const std::string& name : file.names()) weights[name] = file.tensor(name);
  for (auto& [name, weight] : weights) weight.set_requires_grad(!name.ends_with(".mean"));
  const Batch batch = trainer.loader().next();
  at::Tensor loss = at::zeros({});
  for (const Fields& fields : batch.micro_batches) {
    at::Tensor y = at::linear(fields.at("input"), weights["first.weight"], weights["first.bias"]).relu();
    for (const std::string bias : {"middle.0.bias", "middle.1.bias"})
      y = at::linear(y, weights["middle.0.weight"], weights[bias]).relu() * mlp.constants().at("scale");
    y = at::linear(y, weights["last.weight"], weights["last.bias"]);
    loss = loss + (y - fields.at("target")).pow(2).sum();
  }
  EXPECT_EQ(batch.targets, 16);
  loss = loss / static_cast<double>(batch.targets);
  loss.backward();
  const StepResult result = trainer.step(batch, trainer.variant());
  EXPECT_NEAR(result.loss, loss.item<double>(), 1e-6 * loss.item<double>());
  for (const Parameter* parameter : trainer.weights()) {
    if (parameter->is_buffer()) continue;
    const at::Tensor& before = weights.at(parameter->name());
    const at::Tensor moved = before.detach() - parameter->value;  // moved by its gradient
    const double size = before.grad().abs().max().item<double>();
    EXPECT_GT(size, 0) << parameter->name();
    EXPECT_LE((moved - before.grad()).abs().max().item<double>(), 1e-5 * std::max(1.0, size)) << parameter->name();
  }
}

TEST_F(CapturedRun, SavesABundleAgain) {
  Trainer trainer(config());
  trainer.step();
  save_model(folder_.path("saved"), trainer.config().model, 1, trainer.weights());
  for (const char* name : {"graph.json", "constants.safetensors", "notes.txt"})
    EXPECT_EQ(test::read_file(folder_.path(std::string("saved/") + name)),
              test::read_file(folder_.path(std::string("bundle/") + name)));
  Config again = config();
  again.model.from = folder_.path("saved");
  again.model.type = read_hf_config(again.model.from);
  const auto evaluated = Trainer(again).evaluate();
  const auto expected = trainer.evaluate();
  ASSERT_TRUE(evaluated && expected);
  EXPECT_EQ(evaluated->loss, expected->loss);
}

// A link in a bundle may lead to a file that nobody meant to give away.
TEST_F(CapturedRun, DoesNotSaveWhatLinksOutOfTheBundle) {
  const std::string secret = folder_.write("secret", "secret");
  std::filesystem::create_symlink(secret, folder_.path("bundle/secret.txt"));
  std::filesystem::create_symlink("notes.txt", folder_.path("bundle/same.txt"));
  Trainer trainer(config());
  SaveConfig to;
  to.model = folder_.path("saved");
  const std::vector<std::string> parts{"secret.txt", "outside of its folder"};
  test::expect_error([&] { check_save(to, trainer.config().model); }, parts);
  test::expect_error([&] { save_model(to.model, trainer.config().model, 1, trainer.weights()); }, parts);
  EXPECT_FALSE(std::filesystem::exists(to.model));
  std::filesystem::remove(folder_.path("bundle/secret.txt"));
  save_model(to.model, trainer.config().model, 1, trainer.weights());
  EXPECT_EQ(test::read_file(folder_.path("saved/same.txt")), "of the module");
}

TEST_F(CapturedRun, RefusesAPipeInPlaceOfItsGraph) {
  std::filesystem::remove(folder_.path("bundle/graph.json"));
  ASSERT_EQ(::mkfifo(folder_.path("bundle/graph.json").c_str(), 0600), 0);
  test::expect_error([&] { config(); }, {"graph.json", "pipe"});
}

// Weights that the file or model.freeze freezes stay as they are.
TEST_F(CapturedRun, KeepsFrozenWeights) {
  for (const bool by_file : {true, false}) {
    MlpGraph mlp;
    mlp.frozen_first = by_file;
    const TempFolder folder;
    write_bundle(folder, mlp);
    std::vector<Outcome> outcomes;
    for (const int ranks : {1, 2}) {
      Config frozen = config();
      frozen.model.from = folder.path("bundle");
      frozen.model.type = read_hf_config(frozen.model.from);
      frozen.pipeline.ranks = ranks;
      frozen.pipeline.schedule = "1f1b";
      frozen.pipeline.p2 = "fill";
      if (!by_file) frozen.model.freeze = {"first.*", "middle.0.bias"};
      Trainer trainer(frozen);
      const SafetensorsFile before(folder.path("bundle/model.safetensors"));
      outcomes.push_back(test::train_until(trainer, kSteps));
      for (const Parameter* parameter : trainer.weights()) {
        if (parameter->is_buffer()) continue;
        EXPECT_EQ(at::equal(parameter->value, before.tensor(parameter->name())), !parameter->trainable())
            << parameter->name();
      }
    }
    expect_same_bits(outcomes[0], outcomes[1], by_file ? "by file" : "by model.freeze");
  }
}

TEST_F(CapturedRun, RefusesUnsupportedSettings) {
  const auto refused = [&](const auto& change, const std::vector<std::string>& parts) {
    Config bad = config();
    change(bad);
    test::expect_error([&] { check_config(bad); }, parts);
  };
  refused([](Config& c) { c.pipeline.micro_batch_size = 3; }, {"captured with micro-batches of 4"});
  refused([](Config& c) { c.train.precision = "bf16"; },
          {"train.precision is \"bf16\"", "captured for \"fp32\": set it to that"});
  refused([](Config& c) { c.model.lora = 4; }, {"model.lora", "takes no adapters"});
  refused(
      [](Config& c) {
        c.data.arrays = "";
        c.data.text = "*.txt";
      },
      {"data.text is given", "arrays of its fields"});
  refused([](Config& c) { c.model.type = ModelOptions("captured"); }, {"set model.from to a bundle"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
