// Tests whole training runs under mpirun. A run with one process per rank has the losses, norms and weights of the same
// run in one process, to the bit. Every process runs all tests and makes its own reference run.
#include <atomic>
#include <mpi.h>

#include <gtest/gtest.h>

#include "tests/model_options.h"
#include "tests/train/family_config.h"
#include "tests/train/worlds.h"
#include "twobp/pipeline/executor/rank_executor.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/transport/mpi/mpi.h"
#include "twobp/transport/processes.h"
#include "twobp/transport/start.h"

namespace {

// What this process sends by MPI. Heads of messages have tag 0.
std::atomic<int> heads_sent = 0, tensors_sent = 0;

}  // namespace

// In place of the library's, which has a second name for this.
extern "C" int MPI_Isend(const void* buffer, int count, MPI_Datatype type, int to, int tag, MPI_Comm communicator,
                         MPI_Request* request) {
  ++(tag == 0 ? heads_sent : tensors_sent);
  return PMPI_Isend(buffer, count, type, to, tag, communicator, request);
}

namespace twobp::TWOBP_FILE {
namespace {

constexpr int kSteps = 4;

struct Case {
  std::string name;
  std::function<Config(int ranks)> config;
  int replicas = 1;
};

Config llama(const std::string& schedule, int ranks, int replicas) {
  Config config = test::world_config(schedule, ranks);
  test::llama_of(config).layers = 6;  // 14 layers in all, enough for two stages on each of six ranks
  config.pipeline.data_parallel = replicas;
  config.pipeline.run_ahead = "on";
  return config;
}

Config bert(int ranks) {
  Config config = llama("1f1b", ranks, 1);
  test::make_bert(config, test::kSequence, 0.2);
  return config;
}

Config experts(int ranks) {
  Config config = test::family_config(decoder_family("qwen3_moe"), ranks, {"pipeline.micro_batches=4"});
  config.pipeline.ranks = ranks;
  config.pipeline.data_parallel = config.pipeline.experts = 2;
  config.pipeline.timeout = 60;
  return config;
}

// Once the first step has described its messages.
TEST(MpiMessages, AHopTakesOneWithoutAHead) {
  const int ranks = mpi_size();
  if (ranks == 1) GTEST_SKIP() << "one process sends nothing";
  Config config = llama("1f1b", ranks, 1);
  test::llama_of(config).tied = false;
  config.pipeline.run_ahead = "off";
  std::vector<World> worlds;
  worlds.push_back(make_mpi_world(1, ranks));
  run_worlds(std::move(worlds), [&](World world) {
    const int rank = world.process();
    Trainer trainer(config, std::move(world));
    for (int step = 0; step < 2; ++step) trainer.step();
    heads_sent = tensors_sent = 0;
    for (int step = 0; step < 2; ++step) trainer.step();
    const int neighbours = (rank > 0 ? 1 : 0) + (rank + 1 < ranks ? 1 : 0);
    EXPECT_EQ(tensors_sent, 2 * neighbours * config.pipeline.micro_batches) << "rank " << rank;
    EXPECT_LE(heads_sent, 2 * 4) << "rank " << rank << ": control";
    Processes(*trainer.pipeline().world().processes, 60).together([] {});
  });
}

class MpiRuns : public ::testing::TestWithParam<Case> {};

TEST_P(MpiRuns, GiveTheBitsOfOneProcess) {
  const Case& c = GetParam();
  if (mpi_size() % c.replicas != 0) GTEST_SKIP() << mpi_size() << " processes for " << c.replicas << " replicas";
  const int ranks = mpi_size() / c.replicas;
  const Config config = c.config(ranks);
  test::RunOutcome actual;
  int process = 0;
  std::vector<World> worlds;
  worlds.push_back(make_mpi_world(c.replicas, ranks));
  run_worlds(std::move(worlds), [&](World world) {
    process = world.process();
    Trainer trainer(config, std::move(world));
    actual = test::steps_of(trainer, kSteps);
    // Each process compares alone, at its own pace.
    Processes(*trainer.pipeline().world().processes, 60).together([] {});
  });
  const test::RunOutcome expected = test::run_in(make_in_process_worlds(c.replicas, ranks, 0), config, kSteps);
  ASSERT_FALSE(actual.weights.empty());
  // A process has the weights of its own stages, and compares those.
  for (const auto& [name, weight] : expected.weights) actual.weights.try_emplace(name, weight);
  if (process == 0) {
    ASSERT_EQ(actual.reports.back().ranks.size(), static_cast<size_t>(ranks));
    for (const RankTimes& times : actual.reports.back().ranks) EXPECT_GT(times.busy, 0);
  }
  test::expect_same_run(expected, actual, concat("process ", process));
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const char* schedule : {"1f1b", "zb-v", "zb-h1"}) {
    std::string name = schedule;
    std::erase(name, '-');
    all.push_back({concat("Llama_", name), [=](int ranks) { return llama(schedule, ranks, 1); }, 1});
  }
  all.push_back({"Llama_off",
                 [](int ranks) {
                   Config config = llama("1f1b", ranks, 1);
                   config.pipeline.p2 = "off";
                   config.train.clip_norm = 0;
                   return config;
                 },
                 1});
  all.push_back({"Bert_dropout", bert, 1});
  for (const int replicas : {2, 3}) {
    all.push_back(
        {concat("Llama_", replicas, "_replicas"), [=](int ranks) { return llama("1f1b", ranks, replicas); }, replicas});
  }
  all.push_back({"Experts_2_replicas", experts, 2});
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, MpiRuns, ::testing::ValuesIn(cases()), [](const auto& info) { return info.param.name; });

// One thread talks to the other processes while another is in the next step. Either may allocate or release the memory
// of the other, and the counts must stay right.
TEST(MpiRunAhead, CountsNoMemoryAfterwards) {
  for (const char* schedule : {"1f1b", "zb-v"}) {
    Config config = llama(schedule, mpi_size(), 1);
    config.train.clip_norm = 0;  // no rank waits for the others
    std::vector<World> worlds;
    worlds.push_back(make_mpi_world(1, mpi_size()));
    run_worlds(std::move(worlds), [&](World world) {
      Trainer trainer(config, std::move(world));
      Pipeline& pipeline = trainer.pipeline();
      const int rank = pipeline.world().local_ranks().front();
      std::vector<int64_t> held;
      for (const int steps : {4, 16}) {
        test::steps_of(trainer, steps);
        pipeline.on_ranks([&](int r) { pipeline.rank(r).transport().flush(30); });
        held.push_back(pipeline.meter().held(rank));
      }
      EXPECT_EQ(held[0], held[1]) << schedule << ", rank " << rank;
      Processes(*pipeline.world().processes, 60).together([] {});
    });
  }
}

// The first rank ends a clipped step late. The others have continued, and must undo the step.
TEST(MpiRunAhead, UndoesSteps) {
  for (const char* schedule : {"1f1b", "zb-h2"}) {
    const int ranks = mpi_size();
    Config config = llama(schedule, ranks, 1);
    test::llama_of(config).tied = false;  // otherwise ranks wait for each other's gradients
    config.optimizer.lr = 1e-4;
    config.pipeline.run_ahead = "off";
    config.train.clip_norm = 0;
    constexpr int kMoreSteps = 8;
    const auto [expected, clipped] = test::clip_one_step(config, [&](const Config& clips) {
      return test::run_in(make_in_process_worlds(1, ranks, 0), clips, kMoreSteps);
    });
    ASSERT_GT(clipped, 0);
    config.pipeline.run_ahead = "on";
    const test::Environment late("TWOBP_FAIL", concat("optimizer:step=", clipped, ":rank=0:seconds=0.3"));
    std::vector<World> worlds;
    worlds.push_back(make_mpi_world(1, ranks));
    run_worlds(std::move(worlds), [&](World world) {
      const bool first = world.is_first();
      Trainer trainer(config, std::move(world));
      test::RunOutcome actual = test::steps_of(trainer, kMoreSteps);
      Processes(*trainer.pipeline().world().processes, 60).together([] {});
      for (const auto& [name, weight] : expected.weights) actual.weights.try_emplace(name, weight);
      test::expect_same_run(expected, actual, schedule);
      EXPECT_TRUE(first || actual.taken_back > 0) << schedule;
    });
  }
}

// The first process shows all output, and the others show only their failures.
class Failures : public ::testing::EmptyTestEventListener {
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (result.failed())
      std::cout << result.file_name() << ':' << result.line_number() << ": " << result.message() << std::endl;
  }
};

}  // namespace
}  // namespace twobp::TWOBP_FILE

int main(int count, char** values) {
  ::testing::InitGoogleTest(&count, values);
  twobp::mpi_size();
  if (twobp::find_launcher().rank > 0) {
    auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new twobp::TWOBP_FILE::Failures);
  }
  return RUN_ALL_TESTS();
}
