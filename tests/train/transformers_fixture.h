// This file helps to compare with transformers. Python modules make models, data and results in a folder.
// Configurations train those models here and give their logits. The tests are skipped if Python has no transformers.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/train/helpers.h"
#include "tests/train/training.h"
#include "twobp/data/text/python.h"
#include "twobp/models/model_type.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/train/build_model.h"
#include "twobp/train/update/optimizer.h"
#include "twobp/train/weights/weight_files.h"

namespace twobp::test {

// Returns the ratio of the largest difference to the largest value.
inline double relative_error(const at::Tensor& actual, const at::Tensor& expected) {
  return ((actual - expected).abs().max() / expected.abs().max()).item<double>();
}

// Returns every part of packed parameters under its name, as a view of the masters.
inline std::map<std::string, at::Tensor> parts_of(const std::vector<Parameter*>& parameters) {
  std::map<std::string, at::Tensor> parts;
  for (const Parameter* parameter : parameters) {
    for (const auto& [name, rows] : parameter->parts_of(parameter->master)) {
      EXPECT_TRUE(parts.emplace(name, rows).second) << name << " twice";
    }
  }
  return parts;
}

class TransformersTest : public ::testing::Test {
 protected:
  static constexpr double kTolerance = 1e-5;  // relative; both sides compute in float32

  // Call this in a suite's SetUpTestSuite. `oracle` is a Python module of this folder.
  static void make_models(const std::string& oracle) {
    oracle_ = oracle;
    folder_ = std::make_unique<TempFolder>();
    made_ = ask_oracle("make");
  }
  static void TearDownTestSuite() { folder_.reset(); }
  void SetUp() override {
    if (made_.starts_with("skip")) GTEST_SKIP() << made_;
    ASSERT_EQ(made_, "ok");
  }

  // Calls the oracle's function of that name and returns the answer.
  static std::string ask_oracle(const std::string& function) {
    constexpr const char* kScripts = TWOBP_SOURCE_DIR "/tests/train";
    // One process for all suites, because it imports transformers, which takes seconds.
    static PythonProcess python("oracles.py", read_file(concat(kScripts, "/oracles.py")), {kScripts},
                                /*timeout=*/300);
    static const std::string has_packages = python.read_line();
    if (has_packages != "ok") return has_packages;
    python.write(concat(oracle_, " ", function, " ", folder_->path(""), "\n"));
    return python.read_line();
  }
  static std::string path(const std::string& name) { return folder_->path(name); }
  static nlohmann::json facts(const std::string& folder) {
    return nlohmann::json::parse(read_file(path(folder + "/facts.json")));
  }

  // Makes a step of plain SGD on the data of case `name`, in two micro-batches. `more` gives their size.
  static Config sgd_config(const std::string& name, int stages, const std::vector<std::string>& more,
                           const std::string& model = "model") {
    std::vector<std::string> keys = {"model.from=" + path(name + "/" + model),
                                     "data.arrays=" + path(name + "/data"),
                                     "data.held_out=0",
                                     "data.shuffle=false",
                                     "optimizer.type=sgd",
                                     "optimizer.weight_decay=0",
                                     "optimizer.schedule=constant",
                                     "pipeline.micro_batches=2",
                                     "pipeline.pin=false",
                                     concat("pipeline.stages=", stages)};
    keys.insert(keys.end(), more.begin(), more.end());
    Config config = load_config("", keys);
    config.optimizer.lr = facts(name).at("lr").get<double>();
    return config;
  }

  // Returns the logits of all positions in evaluation. `x` is the input of the first layer besides the fields.
  static at::Tensor logits(const Config& config, const Fields& fields, Values x = {}) {
    const ModelSpec model = build_model(config.model);
    std::vector<std::unique_ptr<Layer>> layers;
    std::vector<Parameter*> parameters;
    for (const LayerSpec& spec : model.layers) {
      layers.push_back(spec.make());
      layers.back()->collect_parameters(parameters);
    }
    for (Parameter* parameter : parameters) parameter->allocate_value(1);
    load_weights(parameters, config.model.weights());
    Context context;
    context.fields = &fields;
    context.training = false;
    context.wants_logits = true;
    std::vector<Saved> saved(layers.size());
    for (size_t i = 0; i < layers.size(); ++i) x = layers[i]->forward(std::move(x), context, saved[i]);
    return x[0];
  }
  static Fields samples(const Config& config, const std::vector<int64_t>& indices, int64_t epoch) {
    return open_data(config.data, config.model.input(), 1).train->read(indices, epoch);
  }
  static at::Tensor expected_logits(const std::string& name) {
    return SafetensorsFile(path(name + "/logits.safetensors")).tensor("logits").clone();
  }

  // Compares parts of weights with files, to the bit.
  static void expect_same_parts(const std::map<std::string, at::Tensor>& actual, const SafetensorsFile& expected) {
    for (const auto& [part, value] : actual) EXPECT_TRUE(same_bits(value, expected.tensor(part))) << part;
  }
  // Compares a weight before and after a step. Steps are much smaller than weights. So they are compared too, within
  // the float32 rounding of the difference.
  static void expect_same_step(const std::string& part, const at::Tensor& value, const at::Tensor& before,
                               const at::Tensor& after) {
    EXPECT_LT(relative_error(value, after), kTolerance) << part;
    const at::Tensor step = after - before;
    EXPECT_GT(step.abs().max().item<double>(), 1e-4) << part;
    EXPECT_LT(relative_error(value - before, step), 1e-3) << part;
  }

 private:
  // These belong to the fixture of the running suite. Suites run one after the other.
  static inline std::string oracle_, made_;
  static inline std::unique_ptr<TempFolder> folder_;
};

}  // namespace twobp::test
