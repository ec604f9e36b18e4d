// Counts the messages of whole runs with many ranks: their start and their steps.
#include <numeric>

#include <gtest/gtest.h>

#include "tests/train/worlds.h"
#include "tests/transport/counted.h"
#include "twobp/transport/start.h"
#include "twobp/transport/threads/in_process.h"

namespace twobp::TWOBP_FILE {
namespace {

struct Case {
  int replicas;
  int ranks;
  double clip_norm;
  bool shard;
};

Config config_of(const Case& c) {
  Config config = test::tiny_config();
  test::llama_of(config).dim = 8;
  test::llama_of(config).heads = test::llama_of(config).kv_heads = 1;
  test::llama_of(config).hidden = 8;
  test::llama_of(config).layers = std::max(1, c.ranks / 2);  // of two parts each
  config.pipeline.ranks = c.ranks;
  config.pipeline.stages = 0;
  config.pipeline.micro_batches = 2;
  config.pipeline.data_parallel = c.replicas;
  config.train.clip_norm = c.clip_norm;
  config.train.steps = 4;
  config.optimizer.shard = c.shard;
  return config;
}

bool is_control(Group group, MessageKind kind) {
  if (kind != MessageKind::kPart && kind != MessageKind::kSum) return false;
  return group != Group::kReplicas;  // gradients
}

void expect_few_messages(const std::vector<Case>& cases) {
  for (const Case& c : cases) {
    SCOPED_TRACE(concat(c.replicas, " x ", c.ranks, " ranks, clip_norm ", c.clip_norm, ", shard ", c.shard));
    const int all = c.replicas * c.ranks;
    const Config config = config_of(c);
    auto network = make_in_process_transports(all, 0);
    std::vector<std::shared_ptr<test::Counted>> ends;
    std::vector<World> worlds;
    for (auto& end : network) {
      ends.push_back(std::make_shared<test::Counted>(std::move(end)));
      worlds.push_back(make_process_world(std::shared_ptr<Transport>(ends.back()), c.replicas, c.ranks));
    }
    std::vector<int> at_start(all);
    std::vector<std::vector<test::Counts>> steps(all);
    run_worlds(std::move(worlds), [&](World world) {
      const int rank = world.process();
      Trainer trainer(config, std::move(world));
      at_start[rank] = test::sum_of(ends[rank]->sent());
      for (int step = 0; step < 4; ++step) {
        trainer.step();
        steps[rank].push_back(ends[rank]->sent());
      }
    });
    // With the pops of a store, two requests each.
    EXPECT_LE(std::accumulate(at_start.begin(), at_start.end(), 0), 14 * all) << "at the start";
    for (const int step : {2, 3}) {  // the first ones also agree on caps
      int forward = 0, backward = 0;
      for (int rank = 0; rank < all; ++rank) {
        int control = 0;
        for (const auto& [what, count] : steps[rank][step]) {
          if (is_control(what.first, what.second)) control += count;
          if (what.second == MessageKind::kForward) forward += count;
          if (what.second == MessageKind::kBackward) backward += count;
        }
        EXPECT_LE(control, 4) << "rank " << rank << ", step " << step + 1;
      }
      const int hops = c.replicas * (c.ranks - 1) * config.pipeline.micro_batches;
      EXPECT_EQ(forward, hops);
      EXPECT_EQ(backward, hops);
    }
  }
}

TEST(MessageCountsOfRuns, AStepTakesFourControlMessagesARankAndOneMessageAHop) {
  expect_few_messages({{1, 2, 0, false},
                       {1, 5, 1, false},
                       {2, 2, 1, false},
                       {2, 3, 1, true},
                       {1, 16, 1, false},
                       {4, 8, 1, true},
                       {4, 8, 0, false}});
}

TEST(MessageCountsOfRuns, SoDoManyRanks) {
  expect_few_messages({{8, 64, 1, true}});
}

// Replicas with shards exchange as many bytes with streamed gradients as with kept ones.
TEST(MessageCountsOfRuns, StreamedGradientsSendTheSameBytes) {
  const auto bytes_of = [](const std::string& gradients) {
    Config config = test::tiny_config();
    config.pipeline.ranks = 1;
    config.pipeline.stages = 0;
    config.pipeline.data_parallel = 2;
    config.optimizer.shard = true;
    config.pipeline.gradients = gradients;
    auto network = make_in_process_transports(2, 0);
    std::vector<std::shared_ptr<test::Counted>> ends;
    std::vector<World> worlds;
    for (auto& end : network) {
      ends.push_back(std::make_shared<test::Counted>(std::move(end)));
      worlds.push_back(make_process_world(std::shared_ptr<Transport>(ends.back()), 2, 1));
    }
    std::vector<int64_t> bytes(2);
    run_worlds(std::move(worlds), [&](World world) {
      const int process = world.process();
      Trainer trainer(config, std::move(world));
      trainer.step();
      ends[process]->sent_bytes();
      trainer.step();
      bytes[process] = ends[process]->sent_bytes();
    });
    return bytes[0] + bytes[1];
  };
  const int64_t kept = bytes_of("kept");
  EXPECT_EQ(bytes_of("streamed"), kept);
  EXPECT_GT(kept, 0);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
