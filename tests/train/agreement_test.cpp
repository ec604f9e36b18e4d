// Tests processes that were started with different inputs. All of them report the same error before anything is
// computed. It names the difference and the process.
#include <gtest/gtest.h>

#include "tests/model_options.h"
#include "tests/train/helpers.h"
#include "tests/train/worlds.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/pipeline_shape.h"
#include "twobp/train/build_model.h"
#include "twobp/train/check_config.h"
#include "twobp/train/trainer.h"
#include "twobp/transport/start.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_error;

Config config_of(int ranks) {
  Config config = test::tiny_config();
  config.pipeline.ranks = ranks;
  config.pipeline.stages = 0;
  config.pipeline.micro_batches = 2;
  config.pipeline.timeout = 30;
  return config;
}

// Returns the messages of three processes if the process of rank `other` has another configuration.
std::vector<std::string> errors_of(const Config& config, int other, const Config& others) {
  std::vector<std::string> errors(3);
  run_worlds(make_in_process_ranks(1, 3, 0), [&](World world) {
    const int process = world.process();
    try {
      Trainer trainer(process == other ? others : config, std::move(world));
    } catch (const Error& error) {
      errors[process] = error.what();
    }
  });
  return errors;
}

TEST(Agreement, NamesADifferentKeyOnEveryProcess) {
  const std::vector<std::pair<std::string, std::function<void(Config&)>>> changes = {
      {"model.dim", [](Config& c) { test::llama_of(c).dim = 64; }},
      {"model.freeze", [](Config& c) { c.model.freeze = {"model.norm.weight"}; }},
      {"data.shuffle", [](Config& c) { c.data.shuffle = false; }},
      {"pipeline.schedule", [](Config& c) { c.pipeline.schedule = "gpipe"; }},
      {"pipeline.p2", [](Config& c) { c.pipeline.p2 = "off"; }},
      {"pipeline.micro_batches", [](Config& c) { c.pipeline.micro_batches = 4; }},
      {"pipeline.memory_cap", [](Config& c) { c.pipeline.memory_cap = "0"; }},
      {"optimizer.lr", [](Config& c) { c.optimizer.lr = 0.5; }},
      {"train.seed", [](Config& c) { c.train.seed = 8; }},
      {"train.clip_norm", [](Config& c) { c.train.clip_norm = 2; }},
  };
  const Config config = config_of(3);
  for (const auto& [name, change] : changes) {
    for (const int other : {1, 2}) {
      SCOPED_TRACE(concat(name, " on ", other));
      Config others = config;
      change(others);
      const std::vector<std::string> errors = errors_of(config, other, others);
      EXPECT_NE(errors[0].find(concat(name, " is ")), std::string::npos) << errors[0];
      EXPECT_NE(errors[0].find(concat(" on rank ", other)), std::string::npos) << errors[0];
      EXPECT_EQ(errors[1], errors[0]);
      EXPECT_EQ(errors[2], errors[0]);
    }
  }
}

// Of another program, its keys say nothing.
TEST(Agreement, NamesAnotherVersionOnEveryProcess) {
  const Config config = config_of(3);
  std::vector<std::string> errors(3);
  run_worlds(make_in_process_ranks(1, 3, 0), [&](World world) {
    Facts facts = facts_of_program(config);
    if (world.process() == 2) {
      facts.front().second = "twobp 0.0.1, checksum 00000000";
      facts.back().second = "another value";
    }
    try {
      check_agreement(Processes(*world.processes, config.pipeline.timeout), facts);
    } catch (const Error& error) {
      errors[world.process()] = error.what();
    }
  });
  const std::string other = "but twobp 0.0.1, checksum 00000000 on rank 2: start all of them with the same program";
  for (const std::string& error : errors) EXPECT_NE(error.find(other), std::string::npos) << error;
}

TEST(Agreement, IgnoresKeysThatChangeNoResult) {
  const Config config = config_of(3);
  Config others = config;
  others.data.workers = 3;
  others.pipeline.pin = !config.pipeline.pin;
  others.train.log_every = 17;
  EXPECT_EQ(errors_of(config, 1, others), std::vector<std::string>(3));
}

TEST(Agreement, CountsManyDifferences) {
  const Config config = config_of(3);
  Config others = config;
  others.optimizer = {.type = "sgd", .lr = 1, .weight_decay = 2, .beta1 = 0.5, .beta2 = 0.6};
  const std::string error = errors_of(config, 2, others)[0];
  EXPECT_NE(error.find("optimizer.type is \"adamw\" on rank 0, but \"sgd\" on rank 2"), std::string::npos) << error;
  EXPECT_NE(error.find("and 3 more"), std::string::npos) << error;
}

// Files may have other paths on each machine. Only their content counts.
TEST(Agreement, ComparesDataByContent) {
  test::TempFolder folder;
  const auto write = [&](const std::string& name, int64_t first) {
    std::filesystem::create_directory(folder.path(name));
    std::vector<int64_t> ids(20 * 8);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i * 7 % test::kVocab);
    ids[0] = first;
    for (const char* file : {"/input_ids.npy", "/labels.npy"}) {
      folder.write(name + file, test::npy_file<int64_t>("<i8", "(20, 8)", ids));
    }
    return folder.path(name);
  };
  Config config = config_of(3);
  config.data.synthetic = "";
  config.data.sequence = 8;
  config.data.arrays = write("here", 5);
  Config others = config;
  others.data.arrays = write("there", 5);
  EXPECT_EQ(errors_of(config, 1, others), std::vector<std::string>(3));
  others.data.arrays = write("other", 6);
  for (const std::string& error : errors_of(config, 1, others)) {
    EXPECT_NE(error.find("the training data is 20 samples"), std::string::npos) << error;
    EXPECT_NE(error.find("on rank 1"), std::string::npos) << error;
  }
}

TEST(Agreement, ComparesModelsByLayersAndParameters) {
  const ModelSpec model = build_model(config_of(1));
  const auto of = [](const ModelSpec& spec) { return facts_of_model(spec, ScheduleSource("1f1b")); };
  const Facts facts = of(model);
  EXPECT_EQ(facts, of(build_model(config_of(1))));
  const auto differs = [&](const std::function<void(Config&)>& change) {
    Config config = config_of(1);
    change(config);
    return facts != of(build_model(config));
  };
  EXPECT_TRUE(differs([](Config& c) { test::llama_of(c).hidden = 64; }));
  EXPECT_TRUE(differs([](Config& c) { test::llama_of(c).tied = true; }));
  EXPECT_TRUE(differs([](Config& c) { c.model.freeze = {"model.norm.weight"}; }));
  EXPECT_TRUE(differs([](Config& c) { c.model.lora = 2; }));
  EXPECT_FALSE(differs([](Config& c) { c.optimizer.lr = 3; }));
}

// ---- the launcher of a process, and its effect on pipeline.transport

Launcher started(Launcher::Kind kind, int size) {
  Launcher launcher;
  launcher.kind = kind;
  launcher.size = size;
  return launcher;
}

TEST(ChooseTransport, FollowsTheLauncherUnlessToldOtherwise) {
  using Kind = Launcher::Kind;
  PipelineConfig config = config_of(2).pipeline;
  config.data_parallel = 2;
  EXPECT_EQ(choose_transport(start_options(config), Launcher{}), TransportKind::kThreads);
  EXPECT_EQ(choose_transport(start_options(config), started(Kind::kMpi, 1)), TransportKind::kThreads);
  EXPECT_EQ(choose_transport(start_options(config), started(Kind::kMpi, 4)), TransportKind::kMpi);
  EXPECT_EQ(choose_transport(start_options(config), started(Kind::kSlurm, 4)), TransportKind::kMpi);
  EXPECT_EQ(choose_transport(start_options(config), started(Kind::kTorchrun, 4)), TransportKind::kStore);
  config.device = "cuda";
  EXPECT_EQ(choose_transport(start_options(config), Launcher{}), TransportKind::kThreads);
  for (const Kind kind : {Kind::kMpi, Kind::kSlurm, Kind::kTorchrun})
    EXPECT_EQ(choose_transport(start_options(config), started(kind, 4)), TransportKind::kNccl);
  config.transport = "nccl";
  EXPECT_EQ(choose_transport(start_options(config), started(Kind::kMpi, 4)), TransportKind::kNccl);
  config.device = "cpu";
  config.transport = "threads";
  EXPECT_EQ(choose_transport(start_options(config), started(Kind::kMpi, 1)), TransportKind::kThreads);
}

TEST(ChooseTransport, SumsOfManyReplicasAreThoseOfNccl) {
  using Kind = Launcher::Kind;
  PipelineConfig config = config_of(2).pipeline;
  config.device = "cuda";
  const auto by_nccl = [&](const std::string& sums, int replicas) {
    config.sums = sums;
    config.data_parallel = replicas;
    EXPECT_EQ(choose_transport(start_options(config), started(Kind::kTorchrun, 2 * replicas)), TransportKind::kNccl);
    return sums_by_nccl(start_options(config));
  };
  EXPECT_FALSE(by_nccl("auto", 2));
  EXPECT_TRUE(by_nccl("auto", 3));
  EXPECT_TRUE(by_nccl("auto", 64));
  EXPECT_TRUE(by_nccl("nccl", 2));
  EXPECT_FALSE(by_nccl("ordered", 8));
  config.data_parallel = 9;
  expect_error([&] { choose_transport(start_options(config), started(Kind::kTorchrun, 18)); },
               {"pipeline.sums is \"ordered\"", "each of 8 other replicas", "\"auto\""});
}

TEST(ChooseTransport, RefusesATransportThatDoesNotFit) {
  using Kind = Launcher::Kind;
  PipelineConfig config = config_of(2).pipeline;
  expect_error([&] { choose_transport(start_options(config), started(Kind::kMpi, 3)); },
               {"3 processes were started, but pipeline.ranks 2 x pipeline.data_parallel 1 = 2"});
  config.data_parallel = 3;
  expect_error([&] { choose_transport(start_options(config), started(Kind::kSlurm, 2)); },
               {"2 processes were started, but pipeline.ranks 2 x pipeline.data_parallel 3 = 6"});
  config.transport = "mpi";
  expect_error([&] { choose_transport(start_options(config), Launcher{}); },
               {"pipeline.transport is \"mpi\"", "started by itself", "start 6 by mpirun"});
  expect_error([&] { choose_transport(start_options(config), started(Kind::kMpi, 1)); }, {"1 process was started"});
  expect_error([&] { choose_transport(start_options(config), started(Kind::kTorchrun, 6)); }, {"torchrun"});
  config.device = "cuda";
  expect_error([&] { choose_transport(start_options(config), started(Kind::kMpi, 6)); },
               {"pipeline.transport is \"mpi\"", "CPU's memory", "pipeline.device is \"cuda\""});
  config.device = "cpu";
  config.transport = "nccl";
  expect_error([&] { choose_transport(start_options(config), started(Kind::kTorchrun, 6)); },
               {"pipeline.transport is \"nccl\"", "pipeline.device is \"cpu\"", "\"cuda\""});
  config.transport = "threads";
  expect_error([&] { choose_transport(start_options(config), started(Kind::kMpi, 6)); },
               {"pipeline.transport is \"threads\"", "mpirun", "started 6 processes"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
