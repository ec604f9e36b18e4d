// Tests checkpoints of runs whose ranks have processes of their own (threads here, each with a trainer and a world).
// Any other number of processes continues from them, to the bit, whichever process wrote each part. All processes
// choose the same checkpoint, and no process hangs when one fails.
#include <map>
#include <mutex>

#include <gtest/gtest.h>

#include "tests/model_options.h"
#include "tests/train/checkpoint_runs.h"
#include "tests/train/worlds.h"
#include "twobp/core/measure.h"
#include "twobp/models/model_weights.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/train/update/rank_update.h"
#include "twobp/train/update/update.h"
#include "twobp/train/weights/save_model.h"
#include "twobp/train/weights/weight_files.h"

namespace twobp::TWOBP_FILE {
namespace {

namespace fs = std::filesystem;
using test::checkpoint_config;
using test::expect_error;
using test::kSteps;
using test::same_bits;
using test::step_name;
using test::TempFolder;
using test::visible_names;

struct ManyRuns {
  int64_t first_step = 0;
  std::vector<std::string> notes;
  std::vector<double> losses;
  std::map<std::string, at::Tensor> tensors;  // weights and optimizer state of all processes
};

enum class As : uint8_t { kProcessEach, kThreads };  // one process per rank; one process per replica

struct Hooks {
  int64_t stop_after = 1 << 20;
  std::string save_model;
  SaveModelOptions options;
  std::function<void(int process, Trainer& trainer)> after_step;
};

std::vector<World> worlds_of(const Config& config, As as) {
  const int replicas = config.pipeline.data_parallel;
  const int ranks = config.pipeline.stages;
  return as == As::kThreads ? make_in_process_worlds(replicas, ranks, 0) : make_in_process_ranks(replicas, ranks, 0);
}

// Replaces pieces by whole tensors. All become flat.
void join_pieces(std::map<std::string, at::Tensor>& tensors) {
  std::map<std::string, std::map<int64_t, at::Tensor>> pieces;
  for (const auto& [stored, tensor] : tensors) {
    const PieceName piece = parse_piece(stored);
    pieces[piece.name][piece.begin] = tensor.reshape({-1});
  }
  tensors.clear();
  for (const auto& [name, parts] : pieces) {
    Values in_order;
    int64_t end = 0;
    for (const auto& [begin, part] : parts) {
      EXPECT_EQ(begin, end) << name;
      end += part.numel();
      in_order.push_back(part);
    }
    tensors[name] = at::cat(in_order);
  }
}

ManyRuns run_many(const Config& config, As as, bool resume = false, const Hooks& hooks = {}) {
  ManyRuns result;
  std::mutex mutex;
  run_worlds(worlds_of(config, as), [&](World world) {
    const int process = world.process();
    const Processes processes(*world.processes, config.pipeline.timeout);
    Checkpointer checkpointer(config.save, resume, processes);
    Trainer trainer(config, std::move(world));
    std::vector<std::string> notes;
    if (resume) notes = checkpointer.resume(trainer);
    const int64_t first_step = trainer.steps_done();
    std::vector<double> losses;
    while (trainer.steps_done() < std::min(config.train.steps, hooks.stop_after)) {
      losses.push_back(trainer.step().loss);
      if (hooks.after_step) hooks.after_step(process, trainer);
      checkpointer.after_step(trainer);
    }
    checkpointer.finish(trainer);
    if (!hooks.save_model.empty()) {
      save_model(hooks.save_model, config.model, config.data.sequence, trainer.weights(), hooks.options, processes);
    }
    const std::lock_guard lock(mutex);
    if (process == 0) {
      result.first_step = first_step;
      result.notes = notes;
      result.losses = losses;
    } else {
      EXPECT_EQ(notes, std::vector<std::string>{}) << "only the first process reports changes";
    }
    std::vector<LiveTensor> all = trainer.update().live_weights();
    for (LiveTensor& one : trainer.update().live_optimizer_state()) all.push_back(one);
    for (const LiveTensor& one : all) {
      const auto [at, is_new] = result.tensors.try_emplace(one.name, one.tensor.clone());
      EXPECT_TRUE(is_new || same_bits(at->second, one.tensor)) << one.name << " differs between processes";
    }
  });
  join_pieces(result.tensors);
  return result;
}

// Expects that `rest` equals the steps of `whole` after the step of the resume, up to the stop.
void expect_same_course(const ManyRuns& whole, const ManyRuns& rest, const std::string& what) {
  SCOPED_TRACE(what);
  ASSERT_LE(rest.first_step + rest.losses.size(), whole.losses.size());
  const auto begin = whole.losses.begin() + rest.first_step;
  EXPECT_TRUE(same_bits(std::vector<double>(begin, begin + static_cast<ptrdiff_t>(rest.losses.size())), rest.losses));
  if (rest.first_step + rest.losses.size() < whole.losses.size()) return;
  ASSERT_EQ(rest.tensors.size(), whole.tensors.size());
  for (const auto& [name, tensor] : whole.tensors) {
    ASSERT_TRUE(rest.tensors.contains(name)) << name;
    EXPECT_TRUE(same_bits(tensor, rest.tensors.at(name))) << name;
  }
}

class ManyProcesses : public ::testing::TestWithParam<test::Case> {};

// The run has 3 processes, then one process with one stage, then 2, then threads. The bits are those of a run that was
// never stopped.
TEST_P(ManyProcesses, ResumeWithAnyNumber) {
  const TempFolder folder;
  Config config = checkpoint_config(folder);
  GetParam().change(config);
  const auto cut = [&](std::vector<int> split) {
    config.pipeline.stages = static_cast<int>(split.size());
    config.pipeline.split = std::move(split);
  };
  const auto until = [](int64_t step) {
    Hooks hooks;
    hooks.stop_after = step;
    return hooks;
  };
  const ManyRuns whole = run_many(config, As::kThreads);
  ASSERT_EQ(whole.losses.size(), static_cast<size_t>(kSteps));
  config.save.checkpoints = folder.path("many");
  config.save.every = 2;
  cut({3, 2, 3});
  expect_same_course(whole, run_many(config, As::kProcessEach, false, until(1)), "3 stages, a process each");
  cut({8});
  const ManyRuns one = run_many(config, As::kProcessEach, true, until(2));
  EXPECT_EQ(one.first_step, 1);
  expect_same_course(whole, one, "1 stage");
  cut({4, 4});
  const ManyRuns two = run_many(config, As::kProcessEach, true, until(4));
  EXPECT_EQ(two.first_step, 2);
  EXPECT_EQ(two.notes, std::vector<std::string>{});
  expect_same_course(whole, two, "2 stages, a process each");
  cut({1, 6, 1});
  expect_same_course(whole, run_many(config, As::kThreads, true, until(5)), "3 stages, threads");
  cut({2, 1, 5});
  const ManyRuns last = run_many(config, As::kProcessEach, true);
  EXPECT_EQ(last.first_step, 5);
  expect_same_course(whole, last, "3 other stages, a process each");
  const ManyRuns done = run_many(config, As::kProcessEach, true);
  EXPECT_EQ(done.first_step, kSteps);
  expect_same_course(whole, done, "nothing left to do");
  EXPECT_EQ(problems_of(find_checkpoint(config.save.checkpoints)), std::vector<std::string>{});
}

INSTANTIATE_TEST_SUITE_P(
    All, ManyProcesses,
    ::testing::ValuesIn(test::with_common_cases({{"AdamW", [](Config&) {}},
                                                 {"Tied", [](Config& c) { test::llama_of(c).tied = true; }},
                                                 {"Replicas",
                                                  [](Config& c) {
                                                    c.pipeline.data_parallel = 2;
                                                    c.pipeline.micro_batches = 1;
                                                  }},
                                                 {"ReplicasTied",
                                                  [](Config& c) {
                                                    test::llama_of(c).tied = true;
                                                    c.pipeline.data_parallel = 2;
                                                    c.pipeline.micro_batches = 1;
                                                  }},
                                                 {"Sharded",
                                                  [](Config& c) {
                                                    c.pipeline.data_parallel = 2;
                                                    c.pipeline.micro_batches = 1;
                                                    c.optimizer.shard = true;
                                                    test::llama_of(c).dim = 64;  // its matrices are cut
                                                    test::llama_of(c).hidden = 160;
                                                  }}})),
    [](const auto& info) { return std::string(info.param.name); });

// The optimizer state is divided among replicas, then not divided, then divided again, into other pieces. The numbers
// stay the same. Convolutions are stored in another order than that of their indices.
TEST(ManyProcesses, ResumeWithAndWithoutShards) {
  for (const bool pictures : {false, true}) {
    SCOPED_TRACE(pictures ? "pictures" : "text");
    const TempFolder folder;
    Config config = checkpoint_config(folder);
    config.pipeline.data_parallel = 2;
    config.pipeline.micro_batches = 1;
    if (pictures) {
      config.data.arrays = "";
      test::make_tiny_resnet(config);
      config.model.type.as<ResnetOptions>().widths = {8, 128};
      config.model.type.as<ResnetOptions>().block = "basic";  // with large kernels
      config.pipeline.split.clear();
    } else {
      test::llama_of(config).dim = 64;
      test::llama_of(config).hidden = 160;
    }
    const ManyRuns whole = run_many(config, As::kThreads);
    config.save.checkpoints = folder.path("many");
    bool cut = false;
    for (int64_t step = 1; step <= kSteps; ++step) {
      config.optimizer.shard = step % 2 == 0;
      Hooks hooks;
      hooks.stop_after = step;
      const ManyRuns rest = run_many(config, As::kProcessEach, step > 1, hooks);
      EXPECT_EQ(rest.first_step, step - 1);
      EXPECT_EQ(rest.notes, std::vector<std::string>{});
      ASSERT_EQ(rest.losses.size(), 1U);
      EXPECT_TRUE(same_bits(std::vector<double>{whole.losses[step - 1]}, rest.losses)) << step;
      if (step == kSteps) expect_same_course(whole, rest, "the last step");
      const Checkpoint checkpoint(find_checkpoint(config.save.checkpoints));
      for (const std::string& name : checkpoint.names(CheckpointFile::kOptimizer))
        cut = cut || !parse_piece(name).whole();
    }
    EXPECT_TRUE(cut) << "no tensor was large enough";
  }
}

// The batch may be divided in another way. That changes bits, and a note says so. Another batch is refused.
TEST(ManyProcesses, ResumeWithAnotherNumberOfReplicas) {
  const TempFolder folder;
  Config config = checkpoint_config(folder);
  config.pipeline.data_parallel = 2;
  config.pipeline.micro_batches = 1;
  Hooks hooks;
  hooks.stop_after = 3;
  run_many(config, As::kProcessEach, false, hooks);
  config.pipeline.data_parallel = 1;
  expect_error([&] { run_many(config, As::kProcessEach, true); },
               {"cannot resume", "pipeline.micro_batches x pipeline.data_parallel is 1 but 2"});
  config.pipeline.micro_batches = 2;
  const ManyRuns rest = run_many(config, As::kProcessEach, true);
  EXPECT_EQ(rest.first_step, 3);
  EXPECT_EQ(rest.losses.size(), 3U);
  ASSERT_EQ(rest.notes.size(), 1U);
  EXPECT_NE(rest.notes[0].find("pipeline.data_parallel is 1 but 2"), std::string::npos) << rest.notes[0];
}

// The first process finds every torn part, whichever process wrote it. All processes take the previous checkpoint.
TEST(ManyProcesses, TakeTheSameCheckpoint) {
  const TempFolder folder;
  Config config = checkpoint_config(folder);
  const ManyRuns whole = run_many(config, As::kThreads);
  config.save.checkpoints = folder.path("many");
  run_many(config, As::kProcessEach);
  const fs::path newest = fs::path(config.save.checkpoints) / step_name(kSteps);
  fs::resize_file(newest / "optimizer-00001-of-00002.safetensors", 200);
  fs::remove(fs::path(config.save.checkpoints) / step_name(kSteps - 1) / "weights-00000-of-00002.safetensors");
  const ManyRuns rest = run_many(config, As::kProcessEach, true);
  EXPECT_EQ(rest.first_step, kSteps - 2);
  ASSERT_EQ(rest.notes.size(), 2U);
  EXPECT_NE(rest.notes[0].find("optimizer-00001-of-00002.safetensors is damaged"), std::string::npos);
  EXPECT_NE(rest.notes[1].find("weights-00000-of-00002.safetensors"), std::string::npos);
  expect_same_course(whole, rest, "past damaged ones");
  expect_same_course(whole, run_many(config, As::kProcessEach, true), "what was written over them");
}

// The error of the failing process is reported, whichever process notices it.
TEST(ManyProcesses, ReportOneError) {
  const TempFolder folder;
  Config config = checkpoint_config(folder);
  Hooks hooks;
  hooks.stop_after = 2;
  run_many(config, As::kProcessEach, false, hooks);
  expect_error([&] { run_many(config, As::kProcessEach); }, {"newest of step 2", "--resume"});
  const CheckpointFolder taken(config.save.checkpoints, 3);
  expect_error([&] { run_many(config, As::kProcessEach, true); }, {"in use by another run"});
}

// One process cannot write its part. The run ends soon with the reason, and the earlier checkpoints stay whole.
TEST(ManyProcesses, ReportAPartThatCannotBeWritten) {
  for (const int process : {0, 1}) {
    for (const int64_t at : {3, kSteps}) {  // in between, and by finish()
      SCOPED_TRACE(concat("process ", process, ", step ", at));
      const TempFolder folder;
      Config config = checkpoint_config(folder);
      Hooks hooks;
      hooks.after_step = [&](int here, Trainer& trainer) {
        if (here != process || trainer.steps_done() != at) return;
        const std::string id = test::read_file(config.save.checkpoints + "/.lock");
        fs::create_directories(config.save.checkpoints + "/" + step_name(at) + "." + id + ".new/" +
                               checkpoint_file_name(CheckpointFile::kWeights, {process, 2}));
      };
      const double begin = now_seconds();
      expect_error(
          [&] { run_many(config, As::kProcessEach, false, hooks); },
          {concat("step ", at), checkpoint_file_name(CheckpointFile::kWeights, {process, 2}), "a folder of that name"});
      EXPECT_LE(now_seconds() - begin, 10);
      const ManyRuns rest = run_many(config, As::kProcessEach, true);
      EXPECT_GE(rest.first_step, at - 2);
      EXPECT_LE(rest.first_step, at - 1);
    }
  }
}

// A process fails while the others write their parts. No process waits for the missing part.
TEST(ManyProcesses, EndWhenOneFails) {
  for (const int process : {0, 1}) {
    const TempFolder folder;
    Config config = checkpoint_config(folder);
    Hooks hooks;
    hooks.after_step = [&](int here, Trainer& trainer) {
      if (here == process && trainer.steps_done() == 3) fail("as if it had died");
    };
    const double begin = now_seconds();
    expect_error([&] { run_many(config, As::kProcessEach, false, hooks); }, {"as if it had died"});
    EXPECT_LE(now_seconds() - begin, 10);
    const ManyRuns rest = run_many(config, As::kProcessEach, true);
    EXPECT_EQ(rest.first_step, 2);
  }
}

// Every process writes its own files. Together they are the model that one process saves.
TEST(ManyProcesses, SaveOneModel) {
  for (const bool tied : {false, true}) {
    for (const int64_t most : {int64_t{1} << 40, int64_t{6000}}) {
      SCOPED_TRACE(concat(tied, " ", most));
      const TempFolder folder;
      Config config = checkpoint_config(folder);
      test::llama_of(config).tied = tied;
      config.model.lora = 2;
      config.model.lora_targets = {"q_proj", "down_proj"};
      Hooks hooks;
      hooks.stop_after = 2;
      hooks.save_model = folder.path("alone");
      run_many(config, As::kThreads, false, hooks);
      hooks.options.max_shard_bytes = most;
      hooks.save_model = folder.path("together");
      config.save.checkpoints = folder.path("many");
      config.pipeline.data_parallel = 1;
      fs::create_directory(folder.path("together"));
      folder.write("together/model.safetensors", "of an older model");
      run_many(config, As::kProcessEach, false, hooks);
      EXPECT_FALSE(fs::exists(folder.path("together/model.safetensors")));
      EXPECT_EQ(test::read_file(folder.path("together/config.json")),
                test::read_file(folder.path("alone/config.json")));
      const ModelWeights alone(folder.path("alone"));
      const ModelWeights together(folder.path("together"));
      ASSERT_EQ(alone.names(), together.names());
      for (const std::string& name : alone.names()) {
        EXPECT_TRUE(same_bits(alone.tensor(name), together.tensor(name))) << name;
      }
      size_t shards = 0;
      for (const std::string& name : visible_names(folder.path("together"))) {
        EXPECT_FALSE(name.ends_with(".new")) << name;
        if (name.ends_with(".safetensors")) ++shards;
      }
      EXPECT_EQ(shards == 2, most > 6000) << shards;
    }
  }
}

// The adapters of all processes are in one file of PEFT's format. Each process reads its own part.
TEST(ManyProcesses, SaveOneAdapter) {
  const TempFolder folder;
  Config config = checkpoint_config(folder);
  config.save.checkpoints = "";
  config.model.lora = 2;
  config.model.lora_targets = {"q_proj", "down_proj"};
  const auto step_and_save = [&](As as, const std::string& to) {
    run_worlds(worlds_of(config, as), [&](World world) {
      const Processes processes(*world.processes, config.pipeline.timeout);
      Trainer trainer(config, std::move(world));
      trainer.step();
      save_adapter(folder.path(to), config.model, trainer.weights(), "float32", processes);
    });
  };
  const auto expect_same = [&](const std::string& a, const std::string& b) {
    for (const char* file : {"/adapter_model.safetensors", "/adapter_config.json"}) {
      EXPECT_EQ(test::read_file(folder.path(a + file)), test::read_file(folder.path(b + file))) << file;
    }
  };
  step_and_save(As::kThreads, "alone");
  step_and_save(As::kProcessEach, "together");
  expect_same("alone", "together");
  config.model.adapter = folder.path("together");
  step_and_save(As::kThreads, "alone2");
  step_and_save(As::kProcessEach, "together2");
  expect_same("alone2", "together2");
  EXPECT_NE(test::read_file(folder.path("alone/adapter_model.safetensors")),
            test::read_file(folder.path("alone2/adapter_model.safetensors")));
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
