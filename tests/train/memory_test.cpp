// Tests the bytes of a whole training run by category: the optimizer's bytes for each weight, and the savings of tying.
// Also proves that steps and evaluations return all memory that they took.
#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>

#include <gtest/gtest.h>

#include "tests/expect_error.h"
#include "tests/model_options.h"
#include "tests/train/helpers.h"
#include "tests/train/worlds.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/profile/profile.h"
#include "twobp/pipeline/step_plan.h"
#include "twobp/schedule/simulate/simulate.h"
#include "twobp/train/gradients.h"
#include "twobp/train/variant.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::tiny_config;
using Category = MemoryCategory;

constexpr int64_t kDim = 32;
constexpr int64_t kEmbedding = test::kVocab * kDim * 4;  // bytes
// The attention has 4 query heads and 2 key-value heads of 8. The MLP has 48.
constexpr int64_t kAttention = (kDim + (4 + 2 * 2) * 8 * kDim + kDim * kDim) * 4;
constexpr int64_t kMlp = (kDim + 3 * 48 * kDim) * 4;
constexpr int64_t kNorm = kDim * 4;
constexpr int64_t kTables = 2 * test::kSequence * 4 * 4;  // cos and sin of a head of 8, per attention layer

int64_t bytes(const MemoryUse& use, Category category) {
  return use.now[static_cast<int>(category)];
}

struct Expected {
  int64_t parameters;
  int64_t gradients;
  int64_t tables;
};

void expect_bytes(Trainer& trainer, const std::vector<Expected>& stages, int optimizer_copies, const char* when) {
  for (size_t s = 0; s < stages.size(); ++s) {
    const MemoryUse use = trainer.pipeline().meter().stage_use(static_cast<int>(s));
    EXPECT_EQ(bytes(use, Category::kParameters), stages[s].parameters) << when << ", stage " << s;
    EXPECT_EQ(bytes(use, Category::kGradients), stages[s].gradients) << when << ", stage " << s;
    EXPECT_EQ(bytes(use, Category::kOptimizer), optimizer_copies * stages[s].parameters) << when << ", stage " << s;
    EXPECT_EQ(bytes(use, Category::kActivations), stages[s].tables) << when << ", stage " << s;
    EXPECT_EQ(bytes(use, Category::kStash), 0) << when << ", stage " << s;
  }
}

void expect_run(const Config& config, std::vector<Expected> stages, int optimizer_copies) {
  Trainer trainer(config);
  std::vector<Expected> before = stages;
  for (Expected& stage : before) stage.tables = 0;  // made by the first forward
  expect_bytes(trainer, before, optimizer_copies, "at the start");
  for (int i = 0; i < 2; ++i) {
    const StepResult result = trainer.step();
    expect_bytes(trainer, stages, optimizer_copies, "after a step");
    for (size_t s = 0; s < stages.size(); ++s) {
      const MemoryUse& use = result.report.stage_memory[s];
      const int64_t own = (1 + optimizer_copies) * stages[s].parameters + stages[s].gradients;
      EXPECT_GT(use.peak, own) << "activations were there, too";
      EXPECT_EQ(use.total(), own + stages[s].tables);
    }
    trainer.evaluate();
    expect_bytes(trainer, stages, optimizer_copies, "after an evaluation");
  }
}

Config config_of(const std::string& optimizer, double momentum, bool tied, const std::vector<int>& split) {
  Config config = tiny_config();
  config.optimizer.type = optimizer;
  config.optimizer.momentum = momentum;
  test::llama_of(config).tied = tied;
  config.data.held_out = 0.01;
  config.pipeline.micro_batches = 3;
  config.pipeline.stages = static_cast<int>(split.size());
  config.pipeline.split = split;
  return config;
}

TEST(TrainingMemory, CountsTheStateOfEachOptimizer) {
  // The first stage has the embedding, attention and MLP. The second has attention, MLP, attention, MLP, norm and head.
  const int64_t first = kEmbedding + kAttention + kMlp;
  const int64_t second = 2 * kAttention + 2 * kMlp + kNorm + kEmbedding;
  const std::vector<Expected> stages = {{first, first, kTables}, {second, second, 2 * kTables}};
  expect_run(config_of("adamw", 0, false, {3, 5}), stages, 2);
  expect_run(config_of("adam", 0, false, {3, 5}), stages, 2);
  expect_run(config_of("sgd", 0.9, false, {3, 5}), stages, 1);
  expect_run(config_of("sgd", 0, false, {3, 5}), stages, 0);
}

// A tied weight is one tensor, and so is its gradient, on one stage as on two of a process. What the embedding adds is
// kept in rows, or from the first step with more tokens than rows in a table.
TEST(TrainingMemory, CountsTiedWeights) {
  const int64_t blocks = 3 * (kAttention + kMlp) + kNorm;
  const int64_t first = kEmbedding + kAttention + kMlp;
  const int64_t second = 2 * kAttention + 2 * kMlp + kNorm;
  const std::vector<Expected> stages = {{first, first - kEmbedding, kTables},
                                        {second, second + kEmbedding, 2 * kTables}};
  Config config = config_of("adamw", 0, true, {8});
  config.pipeline.micro_batches = 1;
  expect_run(config, {{kEmbedding + blocks, kEmbedding + blocks, 3 * kTables}}, 2);
  config = config_of("adamw", 0, true, {3, 5});
  config.pipeline.micro_batches = 1;
  expect_run(config, stages, 2);
  config.pipeline.micro_batches = test::kVocab;
  Trainer trainer(config);
  trainer.step();
  EXPECT_EQ(bytes(trainer.pipeline().meter().stage_use(0), Category::kGradients), first);
  EXPECT_EQ(bytes(trainer.pipeline().meter().stage_use(0), Category::kStash), 0);
}

// A step of three micro-batches.
Simulation simulated(const Pipeline& pipeline, const Variant& variant) {
  const StepPlan plan = make_plan(pipeline, variant, 3);
  return simulate(plan.schedule, profiled_costs(pipeline.layer_costs()), simulation_of(plan));
}

// Streamed gradients: none are held between steps but those of tied weights, at most those of one layer at once, and
// the simulation knows the peak of each rank within 1 %.
TEST(StreamedGradients, TakeTheBytesThatAreSimulated) {
  for (const std::vector<int>& split : {std::vector<int>{8}, {3, 5}}) {
    for (const std::string optimizer : {"adamw", "sgd", "adamw, tied"}) {
      if (optimizer == "sgd" && split.size() > 1) continue;  // messages under way are more than 1 % of so little
      const bool tied = optimizer == "adamw, tied";
      Config config = config_of(tied ? "adamw" : optimizer, 0, tied, split);
      test::llama_of(config).dim = 256;
      test::llama_of(config).hidden = 640;
      config.pipeline.micro_batch_size = 1;
      config.pipeline.memory_cap = "0";
      if (split.size() > 1) config.pipeline.p2 = "end";  // else W runs in waits, which last as long as they happen to
      std::vector<int64_t> kept;
      for (const std::string gradients : {"kept", "streamed"}) {
        config.pipeline.gradients = gradients;
        Trainer trainer(config);
        trainer.step();
        Pipeline& pipeline = trainer.pipeline();
        const Simulation simulation = simulated(pipeline, trainer.variant());
        const StepReport report = trainer.step().report;
        for (int rank = 0; rank < pipeline.ranks(); ++rank) {
          const MemoryUse& use = report.rank_memory[rank];
          const double predicted = static_cast<double>(use.total()) + simulation.ranks[rank].peak_bytes;
          const std::string what = concat(optimizer, ", ", gradients, ", rank ", rank, " of ", pipeline.ranks());
          EXPECT_NEAR(static_cast<double>(use.peak), predicted, 0.01 * predicted) << what;
          if (gradients == "kept") {
            kept.push_back(use.peak);
            continue;
          }
          // The table's gradient is on the rank of the head.
          const int64_t table = tied && rank + 1 == pipeline.ranks() ? test::kVocab * 256 * 4 : 0;
          EXPECT_EQ(bytes(use, Category::kGradients), table) << what;
          // On one rank, the most is held when the smallest gradients are made.
          const int64_t largest = pipeline.ranks() == 1 ? 256 * 256 : 2 * 640 * 256;
          EXPECT_LE(use.at_peak[static_cast<int>(Category::kGradients)], table + 4 * largest + 8 * 4 * 256) << what;
          EXPECT_LT(use.peak, kept[rank]) << what;
        }
      }
    }
  }
}

// The same for other kinds of layers, and for stashes in bfloat16. How long a message is on its sender's account is a
// matter of time, so one is far below 1 % of two ranks' bytes here.
TEST(StreamedGradients, TakeTheBytesThatAreSimulatedInEveryModel) {
  for (const std::string model : {"bert", "mamba", "resnet", "llama"}) {
    for (const int ranks : {1, 2}) {
      Config config = config_of("adamw", 0, /*tied=*/false, {});
      test::llama_of(config).dim = 256;
      test::llama_of(config).hidden = 640;
      if (model == "bert") test::make_bert(config, test::kSequence);
      if (model == "mamba") test::make_mamba(config);
      if (model == "resnet") {
        test::make_tiny_resnet(config);
        config.model.type.as<ResnetOptions>().widths =
            ranks > 1 ? std::vector<int>{1024, 1024} : std::vector<int>{64, 128};
        if (ranks > 1) config.data.image_size = 4;
      }
      if (model == "mamba" && ranks > 1) config.data.sequence = 4;
      if (model == "llama") config.pipeline.stash = "bf16";
      config.pipeline.ranks = ranks;
      config.pipeline.stages = 0;
      config.pipeline.micro_batch_size = 1;
      config.pipeline.memory_cap = "0";
      config.pipeline.gradients = "streamed";
      if (ranks > 1) config.pipeline.p2 = "end";  // as above
      Trainer trainer(config);
      trainer.step();
      Pipeline& pipeline = trainer.pipeline();
      const Simulation simulation = simulated(pipeline, trainer.variant());
      const StepReport report = trainer.step().report;
      for (int rank = 0; rank < ranks; ++rank) {
        const MemoryUse& use = report.rank_memory[rank];
        const double predicted = static_cast<double>(use.total()) + simulation.ranks[rank].peak_bytes;
        EXPECT_NEAR(static_cast<double>(use.peak), predicted, 0.01 * predicted)
            << model << ", rank " << rank << " of " << ranks;
      }
    }
  }
}

class Watcher : public Observer {
 public:
  explicit Watcher(bool keeps = false) : keeps_(keeps) {}
  void on_step(const StepReport& /*report*/) override {}
  bool wants_gradients() const override { return true; }
  void on_gradient(const Parameter& parameter, const at::Tensor& gradient) override {
    const std::lock_guard lock(mutex_);
    seen[parameter.name()].push_back(gradient.clone());
    if (keeps_) kept_.push_back(gradient);
  }

  std::map<std::string, std::vector<at::Tensor>> seen;

 private:
  bool keeps_;
  std::vector<at::Tensor> kept_;
  std::mutex mutex_;
};

// Every gradient is seen once in a step before it is applied, kept and streamed ones with the same bits.
TEST(StreamedGradients, AreSeenByObservers) {
  std::map<std::string, std::vector<at::Tensor>> expected;
  for (const std::vector<int>& split : {std::vector<int>{8}, {3, 5}}) {
    for (const std::string gradients : {"kept", "streamed"}) {
      Config config = config_of("adamw", 0, /*tied=*/true, split);
      config.pipeline.gradients = gradients;
      Trainer trainer(config);
      const auto watcher = std::make_shared<Watcher>();
      trainer.add_observer(watcher);
      trainer.step();
      const double norm = trainer.step().grad_norm;
      double squares = 0;
      for (const auto& [name, gradient] : watcher->seen) {
        ASSERT_EQ(gradient.size(), 2U) << name;
        squares += std::pow(gradient[1].norm().item<double>(), 2);
      }
      EXPECT_NEAR(std::sqrt(squares), norm, 1e-5 * norm);
      if (expected.empty()) expected = watcher->seen;
      ASSERT_EQ(watcher->seen.size(), expected.size());
      for (const auto& [name, gradient] : watcher->seen) {
        for (size_t step = 0; step < 2; ++step)
          EXPECT_TRUE(test::same_bits(gradient[step], expected.at(name)[step])) << name << ", " << gradients;
      }
    }
  }
}

// Of an update in shards, each replica's observers see the numbers that it applies.
TEST(StreamedGradients, AreSeenInShards) {
  for (const std::string gradients : {"kept", "streamed"}) {
    Config config = config_of("adamw", 0, /*tied=*/false, {8});
    config.pipeline.gradients = gradients;
    config.pipeline.data_parallel = 2;
    config.optimizer.shard = true;
    std::mutex mutex;
    std::map<std::string, int64_t> seen, numbers;
    run_worlds(make_in_process_worlds(2, 1, 0), [&](World world) {
      Trainer trainer(config, std::move(world));
      const auto watcher = std::make_shared<Watcher>();
      trainer.add_observer(watcher);
      trainer.step();
      const std::lock_guard lock(mutex);
      for (const Parameter* weight : trainer.weights()) numbers[weight->name()] = weight->numel();
      for (const auto& [name, gradient] : watcher->seen) seen[name] += gradient.at(0).numel();
    });
    EXPECT_EQ(seen, numbers) << gradients;
  }
}

TEST(StreamedGradients, MayNotBeKeptByObservers) {
  for (const std::string gradients : {"kept", "streamed"}) {
    Config config = config_of("adamw", 0, /*tied=*/false, {8});
    config.pipeline.gradients = gradients;
    Trainer trainer(config);
    trainer.add_observer(std::make_shared<Watcher>(/*keeps=*/true));
    test::expect_error([&] { trainer.step(); }, {"an observer keeps the gradient of model.", "keep a copy"});
  }
}

// F and I are exact, so the loss and what I makes are too. W's factors are rounded to 8 bits each.
TEST(Bf16Stash, RoundsTheWeightGradientsOfProductsAlone) {
  Config config = config_of("sgd", 0, /*tied=*/false, {8});
  config.optimizer.lr = 1;
  config.optimizer.weight_decay = 0;
  std::map<std::string, at::Tensor> gradients;  // of the full stash
  double loss = 0;
  int64_t stash = 0;
  int rounded = 0;
  for (const std::string kept : {"full", "bf16"}) {
    config.pipeline.stash = kept;
    config.pipeline.p2 = "end";
    Trainer trainer(config);
    std::map<std::string, at::Tensor> before;
    for (const Parameter* weight : trainer.weights()) before[weight->name()] = weight->master.clone();
    const StepResult result = trainer.step();
    const int64_t held = result.report.stage_memory[0].at_peak[static_cast<int>(Category::kStash)];
    for (const Parameter* weight : trainer.weights()) {
      const at::Tensor gradient = before.at(weight->name()) - weight->master;
      if (kept == "full") {
        gradients[weight->name()] = gradient;
        continue;
      }
      const at::Tensor& exact = gradients.at(weight->name());
      const double error = ((gradient - exact).norm() / exact.norm()).item<double>();
      EXPECT_LT(error, 1.0 / 128) << weight->name();
      const bool is_gain = weight->name().find("norm") != std::string::npos;
      EXPECT_EQ(error > 0, !is_gain) << weight->name();
      rounded += !is_gain;
    }
    if (kept == "full") {
      loss = result.loss;
      stash = held;
    } else {
      EXPECT_EQ(result.loss, loss);
      EXPECT_LE(static_cast<double>(held), 0.52 * static_cast<double>(stash));
    }
  }
  EXPECT_EQ(rounded, 3 * 4 + 2) << "four products in a block, embedding and head";
}

// On one rank, streaming takes no longer. It saves what weights take, and costs the stash of all micro-batches.
TEST(StreamedGradients, AutoStreamsWhereItPays) {
  Config config = config_of("adamw", 0, /*tied=*/false, {8});
  config.pipeline.gradients = "auto";
  config.pipeline.micro_batch_size = 1;
  test::llama_of(config).dim = 256;
  test::llama_of(config).hidden = 640;
  EXPECT_EQ(Trainer(config).gradients().stages, std::vector<bool>{true});
  Config clipped = config;
  clipped.train.clip_norm = 1;
  EXPECT_TRUE(Trainer(clipped).gradients().stages.empty());
  EXPECT_NE(Trainer(clipped).gradients().why.find("train.clip_norm"), std::string::npos);
  config.pipeline.micro_batch_size = 8;
  test::llama_of(config).dim = 32;
  test::llama_of(config).hidden = 48;
  EXPECT_TRUE(Trainer(config).gradients().stages.empty()) << "activations take most of the memory";
}

#if !defined(__SANITIZE_ADDRESS__)  // AddressSanitizer disables the reuse of memory

// After a few steps, no step takes new memory from the system.
TEST(Memory, StepsTakeNothingFromTheSystem) {
  for (const std::string model : {"llama", "bert", "mamba", "resnet"}) {
    for (const std::string schedule : {"1f1b", "gpipe", "zb-v"}) {
      for (const std::string p2 : {"off", "end", "fill"}) {
        Config config = tiny_config();
        if (model == "bert") test::make_bert(config, test::kSequence);
        if (model == "mamba") test::make_mamba(config);
        if (model == "resnet") test::make_tiny_resnet(config);
        config.pipeline.ranks = 2;
        config.pipeline.stages = 0;
        config.pipeline.schedule = schedule;
        config.pipeline.p2 = p2;
        config.pipeline.micro_batches = 4;
        config.pipeline.memory_cap = std::string("0");
        config.train.clip_norm = 1;
        config.data.held_out = 7.0 / 1024;  // in batches of another size than in training
        Trainer trainer(config);
        int64_t most = 0;
        for (const char* when : {"from the start", "after an evaluation"}) {
          int quiet = 0;
          // The time for which a rank holds a received message differs from step to step.
          for (int step = 1; step <= 60 && quiet < 5; ++step) {
            int64_t allocations = 0;
            for (const RankTimes& times : trainer.step().report.ranks) allocations += times.allocations;
            most = std::max(most, allocations);
            quiet = allocations == 0 ? quiet + 1 : 0;
          }
          EXPECT_EQ(quiet, 5) << model << ", " << schedule << ", p2 " << p2 << ", " << when;
          trainer.evaluate();
        }
        EXPECT_GT(most, 0);
      }
    }
  }
}

#endif

}  // namespace
}  // namespace twobp::TWOBP_FILE
