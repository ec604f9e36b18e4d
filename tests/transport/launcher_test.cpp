// Tests which launcher started the process, with made-up environments.
#include <map>
#include <string>

#include <gtest/gtest.h>

#include "tests/expect_error.h"
#include "twobp/transport/start.h"

namespace twobp::TWOBP_FILE {
namespace {

using Variables = std::map<std::string, std::string>;

Launcher find(const Variables& variables) {
  return find_launcher([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

TEST(Launcher, FindsNone) {
  const Launcher launcher = find({{"HOME", "/root"}, {"SLURM_JOB_ID", "7"}});
  EXPECT_EQ(launcher.kind, Launcher::Kind::kNone);
  EXPECT_EQ(launcher.rank, 0);
  EXPECT_EQ(launcher.size, 1);
  EXPECT_FALSE(launcher.started_many());
}

TEST(Launcher, FindsOpenMpi) {
  const Launcher launcher =
      find({{"OMPI_COMM_WORLD_RANK", "3"}, {"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}});
  EXPECT_EQ(launcher.kind, Launcher::Kind::kMpi);
  EXPECT_EQ(launcher.rank, 3);
  EXPECT_EQ(launcher.size, 4);
  EXPECT_EQ(launcher.local_rank, 1);
  EXPECT_TRUE(launcher.started_many());
  EXPECT_EQ(launcher.master_address, "");
}

TEST(Launcher, FindsPmiOfMpichAndOfSlurm) {
  const Launcher hydra = find({{"PMI_RANK", "2"}, {"PMI_SIZE", "6"}, {"MPI_LOCALRANKID", "0"}});
  EXPECT_EQ(hydra.kind, Launcher::Kind::kMpi);
  EXPECT_EQ(hydra.rank, 2);
  EXPECT_EQ(hydra.local_rank, 0);
  const Launcher slurm = find({{"PMI_RANK", "5"},
                               {"PMI_SIZE", "6"},
                               {"SLURM_PROCID", "5"},
                               {"SLURM_STEP_NUM_TASKS", "6"},
                               {"SLURM_LOCALID", "1"}});
  EXPECT_EQ(slurm.rank, 5);
  EXPECT_EQ(slurm.local_rank, 1);
  EXPECT_EQ(find({{"MV2_COMM_WORLD_RANK", "1"}, {"MV2_COMM_WORLD_SIZE", "2"}}).local_rank, 1) << "not said: the rank";
}

TEST(Launcher, FindsSlurmStepsButNotBatchScripts) {
  const Launcher step = find({{"SLURM_PROCID", "7"}, {"SLURM_STEP_NUM_TASKS", "8"}, {"SLURM_LOCALID", "3"}});
  EXPECT_EQ(step.kind, Launcher::Kind::kSlurm);
  EXPECT_EQ(step.rank, 7);
  EXPECT_EQ(step.size, 8);
  EXPECT_EQ(step.local_rank, 3);
  const Launcher batch = find({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_LOCALID", "0"}});
  EXPECT_EQ(batch.kind, Launcher::Kind::kNone);
}

TEST(Launcher, FindsTorchrun) {
  const Launcher launcher = find(
      {{"RANK", "5"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}, {"MASTER_ADDR", "node-3"}, {"MASTER_PORT", "29500"}});
  EXPECT_EQ(launcher.kind, Launcher::Kind::kTorchrun);
  EXPECT_EQ(launcher.rank, 5);
  EXPECT_EQ(launcher.size, 8);
  EXPECT_EQ(launcher.local_rank, 1);
  EXPECT_EQ(launcher.master_address, "node-3");
  EXPECT_EQ(launcher.master_port, 29500);
}

TEST(Launcher, PrefersTheInnerLauncher) {
  Variables variables = {{"OMPI_COMM_WORLD_RANK", "1"},
                         {"OMPI_COMM_WORLD_SIZE", "2"},
                         {"SLURM_STEP_NUM_TASKS", "2"},
                         {"SLURM_PROCID", "0"},
                         {"RANK", "6"},
                         {"WORLD_SIZE", "8"},
                         {"MASTER_ADDR", "10.0.0.1"}};
  EXPECT_EQ(find(variables).kind, Launcher::Kind::kMpi) << "other programs set RANK, too";
  EXPECT_EQ(find(variables).master_address, "10.0.0.1") << "for NCCL under mpirun";
  variables["TORCHELASTIC_RUN_ID"] = "none";
  EXPECT_EQ(find(variables).kind, Launcher::Kind::kTorchrun);
  EXPECT_EQ(find(variables).rank, 6);
  EXPECT_EQ(find({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}}).kind,
            Launcher::Kind::kTorchrun)
      << "srun starts one torchrun on each machine";
}

TEST(Launcher, NamesInvalidVariables) {
  const auto expect = [](const Variables& variables, const std::vector<std::string>& parts) {
    test::expect_error([&] { find(variables); }, parts);
  };
  expect({{"RANK", "one"}, {"WORLD_SIZE", "2"}}, {"RANK", "'one'", "whole number"});
  expect({{"RANK", ""}, {"WORLD_SIZE", "2"}}, {"RANK", "''"});
  expect({{"RANK", "1 "}, {"WORLD_SIZE", "2"}}, {"RANK", "'1 '"});
  expect({{"RANK", "-1"}, {"WORLD_SIZE", "2"}}, {"RANK", "'-1'"});
  expect({{"RANK", "0"}, {"WORLD_SIZE", "0"}}, {"WORLD_SIZE", "'0'"});
  expect({{"RANK", "0"}, {"WORLD_SIZE", "99999999999999999999"}}, {"WORLD_SIZE"});
  expect({{"RANK", "2"}, {"WORLD_SIZE", "2"}}, {"RANK", "WORLD_SIZE", "process 2 of 2"});
  expect({{"RANK", "0"}}, {"RANK is set but WORLD_SIZE is not"});
  expect({{"WORLD_SIZE", "2"}}, {"WORLD_SIZE is set but RANK is not"});
  expect({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "2"}}, {"LOCAL_RANK", "from 0 to 1"});
  expect({{"OMPI_COMM_WORLD_RANK", "x"}, {"OMPI_COMM_WORLD_SIZE", "2"}}, {"OMPI_COMM_WORLD_RANK", "'x'"});
  expect({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "70000"}}, {"MASTER_PORT", "'70000'"});
  expect({{"TORCHELASTIC_RUN_ID", "none"}}, {"is set but"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
