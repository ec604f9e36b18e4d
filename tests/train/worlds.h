// This file makes training runs of several processes for tests. Each world's trainer runs on a thread. Their common
// results are compared, and their weights are gathered.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/train/helpers.h"
#include "tests/train/training.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/train/trainer.h"
#include "twobp/train/update/update.h"
#include "twobp/transport/world.h"

namespace twobp::test {

// These are the results of a run, with its weights by name.
struct RunOutcome {
  std::vector<double> losses;
  std::vector<double> norms;
  std::vector<int64_t> skipped;  // steps
  std::vector<Evaluation> evaluations;
  std::map<std::string, at::Tensor> weights;  // masters
  std::vector<StepReport> reports;            // of the first process
  int64_t taken_back = 0;                     // steps that the ranks undid
};

// The configuration has every feature that needs several processes: tied weights, clipping, evaluation.
inline Config world_config(const std::string& schedule, int ranks) {
  Config config = tiny_config();
  test::llama_of(config).tied = true;
  config.data.held_out = 0.1;
  config.train.clip_norm = 0.3;
  config.train.eval_batches = 2;
  config.pipeline.schedule = schedule;
  config.pipeline.ranks = ranks;
  config.pipeline.stages = 0;
  config.pipeline.micro_batches = 2 * ranks;
  config.pipeline.timeout = 60;
  return config;
}

// The model has BatchNorm, whose statistics change in the forward pass.
inline void make_tiny_resnet(Config& config) {
  config.model = {};
  ResnetOptions resnet;
  resnet.classes = 5;
  resnet.stem = 4;
  resnet.small_images = true;
  resnet.depths = {1, 1};
  resnet.widths = {8, 16};
  config.model.type = resnet;
  config.data.synthetic = "images";
  config.data.image_size = 8;
}

// Trains on tokens, 8 a sample, instead of generated ones.
inline void use_arrays(Config& config, const TempFolder& folder, int64_t samples) {
  std::vector<int64_t> ids(samples * 8);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i * 7 % kVocab);
  const std::string shape = concat("(", samples, ", 8)");
  folder.write("input_ids.npy", npy_file<int64_t>("<i8", shape, ids));
  folder.write("labels.npy", npy_file<int64_t>("<i8", shape, ids));
  config.data.synthetic = "";
  config.data.arrays = folder.path("");
  config.data.sequence = 8;
}

inline void expect_same_run(const RunOutcome& expected, const RunOutcome& actual, const std::string& what) {
  expect_same_numbers(expected, actual, what);
  EXPECT_EQ(expected.skipped, actual.skipped) << what;
  EXPECT_EQ(expected.evaluations, actual.evaluations) << what;
  ASSERT_EQ(expected.weights.size(), actual.weights.size()) << what;
  for (const auto& [name, weight] : expected.weights) {
    ASSERT_TRUE(actual.weights.contains(name)) << what << ": " << name;
    EXPECT_TRUE(same_bits(weight, actual.weights.at(name))) << what << ": " << name << " differs";
  }
}

// Runs steps on the trainer's own data and evaluates at the end. The weights are those that this process holds.
inline RunOutcome steps_of(Trainer& trainer, int steps) {
  RunOutcome outcome;
  trainer.run_ahead_until(trainer.steps_done() + steps);
  for (int i = 0; i < steps; ++i) {
    StepResult result = trainer.step();
    outcome.losses.push_back(result.loss);
    outcome.norms.push_back(result.grad_norm);
    if (result.skipped) outcome.skipped.push_back(result.step);
    outcome.reports.push_back(std::move(result.report));
  }
  if (const auto held_out = trainer.evaluate()) outcome.evaluations.push_back(*held_out);
  trainer.update().with_masters([&] {
    for (const Parameter* weight : trainer.weights()) {
      outcome.weights[weight->name()] =
          weight->master.to(at::kCPU, weight->master.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
    }
  });
  outcome.taken_back = trainer.update().taken_back();
  return outcome;
}

// Runs all ranks in one process.
inline RunOutcome run_alone(const Config& config, int steps) {
  Trainer trainer(config);
  return steps_of(trainer, steps);
}

// Chooses train.clip_norm so that a clipped step follows an unclipped one, from the second step on. Returns the result
// of `run` with this norm, and the step, which is 0 if there is no such norm. Norms should differ by batch, as they do
// with a low optimizer.lr.
struct ClipsOneStep {
  RunOutcome outcome;
  int step = 0;
};
inline ClipsOneStep clip_one_step(Config& config, const std::function<RunOutcome(const Config&)>& run) {
  for (const double norm : run(config).norms) {
    config.train.clip_norm = norm * 0.999;
    RunOutcome outcome = run(config);
    for (size_t i = 2; i < outcome.norms.size(); ++i) {
      if (outcome.norms[i - 1] < config.train.clip_norm && outcome.norms[i] > config.train.clip_norm)
        return {std::move(outcome), static_cast<int>(i) + 1};
    }
  }
  return {};
}

// Runs all worlds. Every world must have the losses, norms and so on of the first. A weight that two worlds hold must
// be the same in both. `begin`: what a trainer does before its steps.
inline RunOutcome run_in(std::vector<World> worlds, const Config& config, int steps,
                         const std::function<void(Trainer&)>& begin = {}) {
  std::vector<RunOutcome> outcomes(worlds.size());
  run_worlds(std::move(worlds), [&](World world) {
    RunOutcome& outcome = outcomes[world.process()];
    Trainer trainer(config, std::move(world));
    if (begin) begin(trainer);
    outcome = steps_of(trainer, steps);
  });
  RunOutcome whole = outcomes[0];
  for (size_t process = 1; process < outcomes.size(); ++process) {
    RunOutcome& other = outcomes[process];
    for (const auto& [name, weight] : other.weights) {
      const auto [at, is_new] = whole.weights.try_emplace(name, weight);
      EXPECT_TRUE(is_new || same_bits(at->second, weight)) << name << " differs on process " << process;
    }
    other.weights = whole.weights;
    whole.taken_back += other.taken_back;
    expect_same_run(whole, other, concat("process ", process));
  }
  return whole;
}

}  // namespace twobp::test
