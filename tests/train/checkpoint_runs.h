// This file helps the checkpoint tests. A run with checkpoints has only a few samples, so that it takes several epochs.
// It is compared with a run that was never stopped.
#pragma once

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/train/helpers.h"
#include "tests/train/training.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/train/checkpoint/checkpoint_folder.h"
#include "twobp/train/checkpoint/checkpointer.h"
#include "twobp/train/update/rank_update.h"
#include "twobp/train/update/update.h"

namespace twobp::test {

inline constexpr int kSteps = 6;

// Nine samples come in batches of 2 x 2. An epoch has three batches, and the last one is a micro-batch of one sample.
inline void write_data(const TempFolder& folder, const std::string& name, uint64_t seed) {
  std::vector<int32_t> ids;
  SplitMix64 random(seed);
  for (int i = 0; i < 9 * kSequence; ++i) ids.push_back(static_cast<int32_t>(bounded(random, kVocab)));
  const std::string shape = concat("(9, ", kSequence, ")");
  std::filesystem::create_directory(folder.path(name));
  for (const char* file : {"/input_ids.npy", "/labels.npy"}) folder.write(name + file, npy_file("<i4", shape, ids));
}

inline Config checkpoint_config(const TempFolder& folder) {
  if (!std::filesystem::exists(folder.path("data"))) write_data(folder, "data", 3);
  Config config = tiny_config();
  config.data.synthetic = "";
  config.data.arrays = folder.path("data");
  config.pipeline.micro_batches = 2;
  config.pipeline.stages = 2;
  config.pipeline.split = {3, 5};
  config.optimizer.schedule = "cosine";
  config.optimizer.warmup = 2;
  config.train.steps = kSteps;
  config.train.clip_norm = 0.5;
  config.save.checkpoints = folder.path("checkpoints");
  config.save.every = 1;
  config.save.keep = kSteps;
  return config;
}

// This is a kind of training whose whole state is saved.
struct Case {
  const char* name;
  void (*change)(Config& config);
};

// Returns `cases` and the cases of every kind of run.
inline std::vector<Case> with_common_cases(std::vector<Case> cases) {
  cases.insert(cases.end(), {{"Frozen",
                              [](Config& c) {
                                c.model.freeze = {"model.embed_tokens.weight", "model.layers.0.*", "*.o_proj.weight"};
                              }},
                             {"Lora",
                              [](Config& c) {
                                c.model.lora = 2;
                                c.model.lora_targets = {"q_proj", "down_proj"};
                              }},
                             {"BFloat16", [](Config& c) { c.train.precision = "bf16"; }},
                             {"Float16SkipsSteps", [](Config& c) {
                                c.train.precision = "fp16";
                                c.train.loss_scale = 0x1p24;
                              }}});
  return cases;
}

// This is the result of a run to the end of train.steps, or until `stop_after`.
struct RunResult {
  int64_t first_step = 0;  // steps done before the first of these losses
  std::vector<std::string> notes;
  Outcome outcome;
  std::vector<at::Tensor> optimizer;
};

inline RunResult run(const Config& config, bool resume = false, int64_t stop_after = 1 << 20) {
  Checkpointer checkpointer(config.save, resume);
  Trainer trainer(config);
  RunResult result;
  if (resume) result.notes = checkpointer.resume(trainer);
  result.first_step = trainer.steps_done();
  while (trainer.steps_done() < std::min(config.train.steps, stop_after)) {
    const StepResult step = trainer.step();
    EXPECT_EQ(step.step, result.first_step + static_cast<int64_t>(result.outcome.losses.size()) + 1);
    result.outcome.losses.push_back(step.loss);
    result.outcome.norms.push_back(step.grad_norm);
    checkpointer.after_step(trainer);
  }
  checkpointer.finish(trainer);
  result.outcome.weights = copies_of(trainer.weights());
  std::vector<LiveTensor> state = trainer.update().live_optimizer_state();
  std::stable_sort(state.begin(), state.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  for (const LiveTensor& one : state) {
    if (one.first) result.optimizer.push_back(one.tensor.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true));
  }
  return result;
}

// Expects that `resumed` equals the steps of `whole` after the step of the resume.
inline void expect_continues(const RunResult& whole, const RunResult& resumed, const std::string& what) {
  Outcome rest = whole.outcome;
  ASSERT_LE(resumed.first_step, static_cast<int64_t>(rest.losses.size()));
  rest.losses.erase(rest.losses.begin(), rest.losses.begin() + resumed.first_step);
  rest.norms.erase(rest.norms.begin(), rest.norms.begin() + resumed.first_step);
  expect_same_bits(rest, resumed.outcome, what);
  ASSERT_EQ(whole.optimizer.size(), resumed.optimizer.size()) << what;
  for (size_t i = 0; i < whole.optimizer.size(); ++i) {
    EXPECT_TRUE(same_bits(whole.optimizer[i], resumed.optimizer[i])) << what << ": optimizer state " << i;
  }
}

inline std::string step_name(int64_t step) {
  const std::string digits = std::to_string(step);
  return "step-" + std::string(8 - digits.size(), '0') + digits;
}

// Makes a folder of checkpoints that contains only that one.
inline std::string folder_with(const TempFolder& folder, const Config& config, int64_t step, const std::string& name) {
  std::filesystem::create_directories(folder.path(name));
  std::filesystem::copy(config.save.checkpoints + "/" + step_name(step), folder.path(name + "/" + step_name(step)),
                        std::filesystem::copy_options::recursive);
  return folder.path(name);
}

inline std::vector<std::string> visible_names(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().filename() != ".lock") names.push_back(entry.path().filename());
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace twobp::test
