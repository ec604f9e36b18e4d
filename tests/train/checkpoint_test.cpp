// Tests that a resumed run has the bits of a run that never stopped, at every step, for any cut of the pipeline and any
// schedule. Also tests the resumes that are refused.
#include <functional>
#include <set>

#include <gtest/gtest.h>

#include "tests/every_way.h"
#include "tests/model_options.h"
#include "tests/train/checkpoint_runs.h"
#include "twobp/data/data.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/train/build_model.h"
#include "twobp/train/update/rank_update.h"
#include "twobp/train/update/update.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::checkpoint_config;
using test::expect_continues;
using test::expect_error;
using test::folder_with;
using test::kSteps;
using test::run;
using test::RunResult;
using test::TempFolder;

// The resumed run never has the settings of the first run (3 + 5 layers, 1f1b, fill).
void use_other_pipeline(Config& config, int which) {
  struct Other {
    std::vector<int> split;
    const char* schedule;
    const char* p2;
    const char* cap;
  };
  static const std::vector<Other> others = {{{8}, "naive", "off", "auto"},
                                            {{3, 2, 3}, "gpipe", "end", "0"},
                                            {{1, 2, 1, 3, 1}, "1f1b", "cooldown", "auto"},
                                            {{4, 4}, "gpipe", "fill", "1KiB"},
                                            {{5, 3}, "1f1b", "off", "0"}};
  const Other& other = others[static_cast<size_t>(which) % others.size()];
  config.pipeline.split = other.split;
  config.pipeline.stages = static_cast<int>(other.split.size());
  config.pipeline.schedule = other.schedule;
  config.pipeline.p2 = other.p2;
  config.pipeline.memory_cap = other.cap;
}

// The run is resumed at every step, each time on a different pipeline; or at one or two, of which each kind has others.
void expect_bitwise(const Config& config, const TempFolder& folder, bool at_every_step, size_t kind) {
  const RunResult whole = run(config);
  ASSERT_EQ(whole.outcome.losses.size(), static_cast<size_t>(kSteps));
  for (int step = 1; step < kSteps; ++step) {
    if (!at_every_step && (static_cast<size_t>(step) + kind) % 3 != 0) continue;
    Config other = config;
    other.save.checkpoints = folder_with(folder, config, step, concat("from", step));
    use_other_pipeline(other, step);
    const RunResult resumed = run(other, /*resume=*/true);
    EXPECT_EQ(resumed.first_step, step);
    EXPECT_EQ(resumed.notes, std::vector<std::string>{});
    expect_continues(whole, resumed, concat("resumed after step ", step));
  }
  const RunResult done = run(config, /*resume=*/true);
  EXPECT_EQ(done.first_step, kSteps);
  expect_continues(whole, done, "nothing left to do");
}

class ResumeBitwise : public ::testing::TestWithParam<test::Case> {};

TEST_P(ResumeBitwise, AtEveryStep) {
  const TempFolder folder;
  Config config = checkpoint_config(folder);
  GetParam().change(config);
  const std::string name = GetParam().name;
  expect_bitwise(config, folder, name == "AdamW" || test::every_way(), name.size());
}

INSTANTIATE_TEST_SUITE_P(
    All, ResumeBitwise,
    ::testing::ValuesIn(test::with_common_cases({{"AdamW", [](Config&) {}},
                                                 {"AdamWTied", [](Config& c) { test::llama_of(c).tied = true; }},
                                                 {"Adam", [](Config& c) { c.optimizer.type = "adam"; }},
                                                 {"SgdMomentum",
                                                  [](Config& c) {
                                                    c.optimizer.type = "sgd";
                                                    c.optimizer.momentum = 0.9;
                                                  }},
                                                 {"Sgd", [](Config& c) { c.optimizer.type = "sgd"; }},
                                                 {"MuonAveraged",
                                                  [](Config& c) {
                                                    c.optimizer.type = "muon";
                                                    c.optimizer.average = 0.5;
                                                  }},
                                                 {"NotShuffledLinear",
                                                  [](Config& c) {
                                                    c.data.shuffle = false;
                                                    c.optimizer.schedule = "linear";
                                                    c.train.clip_norm = 0;
                                                  }}})),
    [](const auto& info) { return std::string(info.param.name); });

// The run stops in the middle of an epoch of packed documents, whose costs order the samples of a batch. The model need
// not keep them apart for this.
TEST(Resume, WorksWithPackedDocuments) {
  const TempFolder folder;
  Config config = checkpoint_config(folder);
  SplitMix64 random(4);
  constexpr int kSamples = 20;
  const auto sequence = static_cast<int>(config.data.sequence);
  std::vector<int32_t> ids, starts;
  for (int i = 0; i < kSamples * sequence; ++i) {
    ids.push_back(static_cast<int32_t>(bounded(random, 20)));
    const int place = i % sequence;
    starts.push_back(place == 0 || bounded(random, 3) == 0 ? place : starts.back());
  }
  const std::string shape = concat("(", kSamples, ", ", sequence, ")");
  for (const char* name : {"input_ids.npy", "labels.npy"})
    folder.write(name, test::npy_file<int32_t>("<i4", shape, ids));
  folder.write("document_starts.npy", test::npy_file<int32_t>("<i4", shape, starts));
  config.data.arrays = folder.path("");
  config.save.checkpoints = folder.path("whole");
  ModelInput input = config.model.input();
  input.documents = true;
  const auto run_to = [&](bool resume, int64_t last) {
    Trainer trainer(config, build_model(config), open_data(config.data, input, config.train.seed));
    Checkpointer checkpointer(config.save, resume);
    if (resume) checkpointer.resume(trainer);
    EXPECT_NE(trainer.steps_done() % trainer.loader().batches_per_epoch(), resume ? 0 : -1);
    test::Outcome outcome;
    while (trainer.steps_done() < last) {
      outcome.losses.push_back(trainer.step().loss);
      checkpointer.after_step(trainer);
    }
    checkpointer.finish(trainer);
    outcome.weights = test::copies_of(trainer.weights());
    return outcome;
  };
  test::Outcome whole = run_to(false, kSteps);
  config.save.checkpoints = folder.path("resumed");
  run_to(false, 2);
  whole.losses.erase(whole.losses.begin(), whole.losses.begin() + 2);
  test::expect_same_bits(whole, run_to(true, kSteps), "packed");
}

// The equality above can fail: without any one piece of the state, the run differs.
TEST(Resume, EveryPieceOfTheStateMatters) {
  const TempFolder folder;
  const Config config = checkpoint_config(folder);
  const RunResult whole = run(config);
  const std::vector<double> expected(whole.outcome.losses.begin() + 3, whole.outcome.losses.end());
  const auto losses_after = [&](const std::function<void(Trainer&)>& lose) {
    const TempFolder copy;
    Config other = config;
    other.save.checkpoints = folder_with(copy, config, 3, "from");
    Checkpointer checkpointer(other.save, true);
    Trainer trainer(other);
    checkpointer.resume(trainer);
    lose(trainer);
    std::vector<double> losses;
    while (trainer.steps_done() < kSteps) losses.push_back(trainer.step().loss);
    return losses;
  };
  EXPECT_EQ(losses_after([](Trainer&) {}), expected);
  for (const char* state : {".exp_avg", ".exp_avg_sq"}) {
    EXPECT_NE(losses_after([&](Trainer& trainer) {
                for (const LiveTensor& one : trainer.update().live_optimizer_state()) {
                  if (one.name.ends_with(state)) one.tensor.zero_();
                }
              }),
              expected)
        << state;
  }
  EXPECT_NE(losses_after([](Trainer& trainer) {
              for (int r = 0; r < trainer.pipeline().ranks(); ++r) trainer.update().restored(r, 0);
            }),
            expected)
      << "number of updates";
  EXPECT_NE(losses_after([](Trainer& trainer) { trainer.go_on_from({3, 4, 1, 0}); }), expected) << "data position";
}

// Float16SkipsSteps above has a loss scale to carry over only if steps are skipped.
TEST(Resume, CarriesTheLossScaleOver) {
  const TempFolder folder;
  Config config = checkpoint_config(folder);
  config.train.precision = "fp16";
  config.train.loss_scale = 0x1p24;
  run(config);
  const Checkpoint first(config.save.checkpoints + "/" + test::step_name(1));
  const Checkpoint last(config.save.checkpoints + "/" + test::step_name(kSteps));
  EXPECT_LT(first.state().position.loss_scale, 0x1p24);
  EXPECT_LT(last.state().optimizer_steps, kSteps);
  EXPECT_EQ(last.state().position.step, kSteps);
}

// Evaluations between the steps change nothing, and neither do rare checkpoints.
TEST(Resume, DoesNotDependOnEvaluationsAndRareCheckpoints) {
  const TempFolder folder;
  Config config = checkpoint_config(folder);
  config.data.held_out = 0.2;
  const RunResult whole = run(config);
  Config other = config;
  other.save.checkpoints = folder.path("other");
  other.save.every = 4;
  other.train.eval_every = 1;
  run(other, false, 5);
  EXPECT_EQ(test::visible_names(other.save.checkpoints),
            (std::vector<std::string>{test::step_name(4), test::step_name(5)}));
  const RunResult resumed = run(other, true);
  EXPECT_EQ(resumed.first_step, 5);
  expect_continues(whole, resumed, "stopped after 5");
}

TEST(Resume, StartsWithoutACheckpoint) {
  const TempFolder folder;
  const Config config = checkpoint_config(folder);
  const RunResult fresh = run(config, /*resume=*/true);
  EXPECT_EQ(fresh.first_step, 0);
  EXPECT_EQ(fresh.notes, std::vector<std::string>{});
  Config other = config;
  other.save.checkpoints = folder.path("other");
  expect_continues(run(other), fresh, "started by --resume");
}

TEST(Resume, RefusesToMixRuns) {
  const TempFolder folder;
  const Config config = checkpoint_config(folder);
  run(config, false, 2);
  expect_error([&] { run(config); }, {config.save.checkpoints, "newest of step 2", "--resume"});
  EXPECT_EQ(test::visible_names(config.save.checkpoints).size(), 2U);
}

// The checkpoint is whole but belongs to another run. This is an error. No older checkpoint is taken, and nothing is
// lost.
TEST(Resume, RefusesTheCheckpointOfAnotherModel) {
  const TempFolder folder;
  const Config config = checkpoint_config(folder);
  run(config, false, 2);
  Config other = config;
  test::llama_of(other).dim = 64;
  expect_error([&] { run(other, true); }, {"cannot resume", "model.dim is 64 but 32 in the checkpoint"});
  other = config;
  test::llama_of(other).layers = 2;
  other.pipeline.split = {};
  expect_error([&] { run(other, true); }, {"model.layers is 2 but 3"});
  other = config;
  other.train.steps = 1;
  other.optimizer.schedule = config.optimizer.schedule;
  expect_error([&] { run(other, true); }, {"train.steps is 1", "later step"});
  EXPECT_EQ(test::visible_names(config.save.checkpoints).size(), 2U);
  EXPECT_EQ(run(config, true).first_step, 2);
}

// The configurations agree but the tensors do not, for example because the weights come from another directory.
TEST(Resume, RefusesTheTensorsOfAnotherModel) {
  const TempFolder folder;
  Config config = checkpoint_config(folder);
  run(config, false, 1);
  const Checkpoint checkpoint(config.save.checkpoints + "/" + test::step_name(1));
  using File = Checkpoint::File;
  Trainer trainer(config);
  NamedTensors weights;
  for (const LiveTensor& one : trainer.update().live_weights()) weights.emplace_back(one.name, one.tensor);
  checkpoint.check_tensors(File::kWeights, weights);
  NamedTensors wrong = weights;
  wrong[3].second = at::zeros({5, 7});
  expect_error([&] { checkpoint.check_tensors(File::kWeights, wrong); },
               {"weights.safetensors", wrong[3].first, "[5, 7]", "another model"});
  wrong = weights;
  wrong[3].second = wrong[3].second.to(at::kDouble);
  expect_error([&] { checkpoint.check_tensors(File::kWeights, wrong); }, {wrong[3].first, "Double"});
  wrong = weights;
  wrong.emplace_back("more.weight", at::zeros({1}));
  expect_error([&] { checkpoint.check_tensors(File::kWeights, wrong); }, {"has no more.weight"});
  wrong = weights;
  const std::string last = wrong.back().first;
  wrong.pop_back();
  std::set<std::string> known;
  for (const auto& [name, tensor] : wrong) known.insert(name);
  expect_error([&] { checkpoint.check_no_others(File::kWeights, known); }, {"has " + last, "this run does not have"});
  known.insert(last);
  checkpoint.check_no_others(File::kWeights, known);
  expect_error([&] { checkpoint.check_tensors(File::kFrozen, weights); }, {"frozen.safetensors has no"});
}

// Any program that reads Hugging Face's files can read a checkpoint's weights.
TEST(Resume, StoresWeightsUnderTheirPublicNames) {
  const TempFolder folder;
  const Config config = checkpoint_config(folder);
  const RunResult whole = run(config);
  const Checkpoint last(config.save.checkpoints + "/" + test::step_name(kSteps));
  const at::Tensor q = last.read(Checkpoint::File::kWeights, "model.layers.1.self_attn.q_proj.weight");
  EXPECT_EQ(q.sizes(), (at::IntArrayRef{32, 32}));
  const at::Tensor k = last.read(Checkpoint::File::kOptimizer, "model.layers.1.self_attn.k_proj.weight.exp_avg");
  EXPECT_EQ(k.sizes(), (at::IntArrayRef{16, 32}));
  EXPECT_GT(k.abs().max().item<float>(), 0);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
