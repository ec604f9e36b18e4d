// Tests replicas of a pipeline. The bits are the same for every schedule, p2 policy and order, for every bucket size,
// and for every place of the optimizer's state. They are those of replicas that run one after the other.
#include <chrono>
#include <cmath>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <thread>

#include <gtest/gtest.h>

#include "tests/model_options.h"
#include "tests/train/helpers.h"
#include "tests/train/worlds.h"
#include "twobp/data/data.h"
#include "twobp/models/hf_config.h"
#include "twobp/nn/kernels/rows/row_arguments.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/stage.h"
#include "twobp/pipeline/step_request.h"
#include "twobp/schedule/simulate/simulate.h"
#include "twobp/train/build_model.h"
#include "twobp/train/update/optimizer_shards.h"
#include "twobp/train/update/update.h"
#include "twobp/train/variant.h"
#include "twobp/train/weights/save_model.h"
#include "twobp/train/weights/weight_files.h"
#include "twobp/transport/collectives.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_same_run;
using test::run_in;
using test::RunOutcome;

constexpr int kSteps = 3;
constexpr double kNoSpin = 0;  // there are more ranks than cores

Config config_of(int replicas) {
  Config config = test::tiny_config();
  test::llama_of(config).tied = true;
  config.train.clip_norm = 0.3;
  config.pipeline.schedule = "1f1b";
  config.pipeline.ranks = 2;
  config.pipeline.stages = 0;
  config.pipeline.micro_batches = 3;
  config.pipeline.data_parallel = replicas;
  return config;
}

RunOutcome run(const Config& config) {
  return run_in(make_in_process_worlds(config.pipeline.data_parallel, config.pipeline.ranks, kNoSpin), config, kSteps);
}

TEST(DataParallel, TheBitsDoNotDependOnScheduleOrderBucketsOrShards) {
  for (const int replicas : {2, 3}) {
    Config standard = config_of(replicas);
    standard.pipeline.p2 = "off";
    const RunOutcome expected = run(standard);
    const auto expect_same = [&](const std::string& what, const std::function<void(Config&)>& change) {
      Config config = config_of(replicas);
      change(config);
      expect_same_run(expected, run(config), concat(replicas, " replicas, ", what));
    };
    for (const std::string schedule : {"1f1b", "gpipe", "interleaved-1f1b", "zb-v"}) {
      for (const std::string p2 : {"off", "end", "cooldown", "fill"}) {
        if (schedule == "zb-v" && (p2 == "end" || p2 == "cooldown")) continue;
        for (const std::string order : {"bucket", "oldest"}) {
          expect_same(concat(schedule, " ", p2, " ", order), [&](Config& config) {
            config.pipeline.schedule = schedule;
            config.pipeline.p2 = schedule == "zb-v" && p2 == "off" ? "placed" : p2;
            config.pipeline.p2_order = order;
            config.pipeline.bucket = p2 == "end" ? "1" : "10KiB";
            config.optimizer.shard = p2 == "fill";
          });
        }
      }
    }
    expect_same("one bucket, a shard each", [](Config& config) {
      config.pipeline.p2_order = "bucket";
      config.pipeline.bucket = "1GiB";
      config.optimizer.shard = true;
    });
  }
}

// An epoch has 22 samples in batches of 16. So every second batch has 6 samples, which give 3 micro-batches to the
// first replica and none to the last.
TEST(DataParallel, TheBitsDoNotDependOnTheseInShortBatches) {
  test::TempFolder folder;
  Config config = config_of(2);
  test::use_arrays(config, folder, 22);
  config.pipeline.micro_batches = 4;
  config.pipeline.p2 = "off";
  const RunOutcome expected = run(config);
  config.pipeline.bucket = "10KiB";
  for (const bool shard : {false, true}) {
    config.optimizer.shard = shard;
    for (const std::string schedule : {"1f1b", "gpipe"}) {
      config.pipeline.schedule = schedule;
      config.pipeline.p2 = schedule == "gpipe" ? "end" : "fill";
      expect_same_run(expected, run(config), concat(schedule, shard ? ", shards" : ""));
    }
  }
}

// The test shards the optimizer in steps that do not wait for the norm and in skipped steps. It has other optimizers
// and precisions, buffers, and weights that are not trained.
TEST(DataParallel, ShardsKeepTheBitsOfEveryKindOfStep) {
  const auto expect_same = [](const std::string& what, const std::function<void(Config&)>& change) {
    Config config = config_of(2);
    test::llama_of(config).dim = 64;  // its matrices are cut
    test::llama_of(config).hidden = 160;
    change(config);
    const RunOutcome whole = run(config);
    config.optimizer.shard = true;
    config.pipeline.bucket = "3KiB";
    expect_same_run(whole, run(config), what);
    return whole;
  };
  expect_same("no clipping", [](Config& config) { config.train.clip_norm = 0; });
  expect_same("muon, running means", [](Config& config) {
    config.optimizer.type = "muon";
    config.optimizer.average = 0.5;
    config.data.held_out = 0.1;  // the means are evaluated
  });
  expect_same("momentum", [](Config& config) {
    config.optimizer.type = "sgd";
    config.optimizer.momentum = 0.9;
  });
  expect_same("bf16", [](Config& config) { config.train.precision = "bf16"; });
  expect_same("bf16, running means", [](Config& config) {
    config.train.precision = "bf16";
    test::llama_of(config).tied = false;
    config.optimizer.average = 0.5;
    config.data.held_out = 0.1;
  });
  const RunOutcome fp16 = expect_same("fp16", [](Config& config) {
    config.train.precision = "fp16";
    config.train.loss_scale = 1e9;
  });
  EXPECT_FALSE(fp16.skipped.empty());
  expect_same("frozen", [](Config& config) {
    test::llama_of(config).tied = false;
    config.model.freeze = {"model.embed_tokens.weight", "model.layers.0.*"};
  });
  expect_same("resnet", [](Config& config) {
    test::make_tiny_resnet(config);
    config.model.type.as<ResnetOptions>().widths = {8, 128};
    config.model.type.as<ResnetOptions>().block = "basic";  // with large kernels
  });
}

// Loading fails on the ranks while these hold whole masters.
TEST(DataParallel, ShardsDoNotHideWhyWeightsAreRefused) {
  test::TempFolder folder;
  Config config = config_of(1);
  std::map<std::string, at::Tensor> tensors;
  {
    const Trainer trainer(config);
    save_model(folder.path("model"), config.model, config.data.sequence, trainer.weights());
    for (const Parameter* parameter : trainer.weights())
      for (auto& [name, rows] : parameter->parts_of(parameter->master)) tensors[name] = rows.clone();
  }
  const std::string name = "model.layers.1.mlp.down_proj.weight";
  tensors.at(name)[0][0].fill_(NAN);
  write_safetensors(folder.path("model/model.safetensors"), {tensors.begin(), tensors.end()}, {});
  config = config_of(2);
  config.model.from = folder.path("model");
  config.model.type = read_hf_config(config.model.from);
  config.optimizer.shard = true;
  for (const std::string precision : {"fp32", "bf16"}) {
    config.train.precision = precision;
    test::expect_error([&] { run(config); }, {name, "not finite", "damaged"});
  }
}

// Gradients that are summed, applied and freed one by one, without those of tied weights, which are kept.
TEST(DataParallel, StreamedGradientsKeepTheBits) {
  for (const int replicas : {2, 3}) {
    for (const bool tied : {false, true}) {
      for (const std::string schedule : {"1f1b", "zb-v"}) {
        Config config = config_of(replicas);
        test::llama_of(config).tied = tied;
        config.train.clip_norm = 0;
        config.pipeline.schedule = schedule;
        config.pipeline.stages = 0;
        config.pipeline.split.clear();
        config.pipeline.ranks = 2;
        config.pipeline.micro_batches = 3;
        test::llama_of(config).hidden = 160;  // its matrices are cut
        const RunOutcome kept = run(config);
        config.pipeline.gradients = "streamed";
        for (const bool shard : {false, true}) {
          config.optimizer.shard = shard;
          config.pipeline.bucket = shard == tied ? "10KiB" : "25MiB";
          const RunOutcome streamed = run(config);
          const std::string what =
              concat(replicas, " replicas, ", schedule, tied ? ", tied" : "", shard ? ", shards" : "");
          expect_same_run(kept, streamed, what);
          run_worlds(make_in_process_worlds(replicas, 2, kNoSpin), [&](World world) {
            Trainer trainer(config, std::move(world));
            trainer.step();
            for (const Parameter* weight : trainer.weights()) {
              const bool kept = tied && weight->name() == "model.embed_tokens.weight";
              EXPECT_EQ(weight->grad.defined(), kept) << what << ", " << weight->name();
            }
          });
        }
      }
    }
  }
}

// Is late with each gradient, and notes the most bytes of gradients that the first rank holds when one is applied.
class Late : public Observer {
 public:
  Late(Pipeline& pipeline, std::chrono::milliseconds by) : pipeline_(pipeline), by_(by) {}
  void on_step(const StepReport& /*report*/) override {}
  bool wants_gradients() const override { return true; }
  void on_gradient(const Parameter& /*parameter*/, const at::Tensor& /*gradient*/) override {
    const MemoryUse use = pipeline_.meter().rank_use(0);
    const std::lock_guard lock(mutex_);
    most = std::max(most, use.now[static_cast<size_t>(MemoryCategory::kGradients)]);
    at_peak = use.at_peak[static_cast<size_t>(MemoryCategory::kGradients)];
    std::this_thread::sleep_for(by_);
  }

  int64_t most = 0;
  int64_t at_peak = 0;

 private:
  Pipeline& pipeline_;
  std::chrono::milliseconds by_;
  std::mutex mutex_;
};

// A replica that is ahead waits before the gradients in its sums take more than three of the largest: beside one that
// is made, it holds those of I, what it sends, and copies of small ones. No ranks wait for each other in a circle.
TEST(DataParallel, StreamedGradientsDoNotPileUp) {
  for (const int replicas : {2, 3}) {
    for (int ranks = 1; ranks + replicas <= 5; ++ranks) {
      Config config = config_of(replicas);
      test::llama_of(config).tied = false;
      test::llama_of(config).hidden = 640;
      test::llama_of(config).layers = 8 * ranks;
      config.train.clip_norm = 0;
      config.pipeline.ranks = ranks;
      config.pipeline.micro_batches = ranks + 1;
      config.pipeline.timeout = 60;
      const RunOutcome kept = run(config);
      config.pipeline.gradients = "streamed";
      config.pipeline.bucket = "1";
      const std::vector<std::string> schedules =
          ranks == 1 ? std::vector<std::string>{"1f1b", "gpipe"} : std::vector<std::string>{"1f1b", "zb-v"};
      for (const std::string& schedule : schedules) {
        config.pipeline.schedule = schedule;
        for (const bool shard : {false, true}) {
          config.optimizer.shard = shard;
          const std::string what = concat(replicas, " replicas of ", ranks, ", ", schedule, shard ? ", shards" : "");
          std::vector<std::shared_ptr<Late>> late(static_cast<size_t>(replicas));
          int64_t all = 0;
          int64_t largest = 0;
          int64_t of_p1 = 0;
          const RunOutcome streamed =
              run_in(make_in_process_worlds(replicas, ranks, kNoSpin), config, kSteps, [&](Trainer& trainer) {
                const int replica = trainer.world().replica;
                const bool last = replica + 1 == replicas;
                late[replica] = std::make_shared<Late>(trainer.pipeline(), std::chrono::milliseconds(last ? 2 : 0));
                trainer.add_observer(late[replica]);
                if (replica > 0) return;
                for (const Parameter* weight : trainer.weights()) {
                  const int64_t bytes = 4 * weight->numel();
                  if (weight->sizes().size() == 1) of_p1 += bytes;
                  largest = std::max(largest, bytes);
                  all += bytes;
                }
              });
          expect_same_run(kept, streamed, what);
          const int64_t most = 5 * largest + of_p1 + replicas * (16 << 10);
          ASSERT_LT(2 * ranks * most, all) << "a stage has more";
          EXPECT_LE(late[0]->most, most) << what;
          EXPECT_LE(late[0]->at_peak, most) << what;
        }
      }
    }
  }
}

// This is the definition. Each replica sums its gradients over its own micro-batches in order. These sums are added in
// the order of the replicas, and one update uses the result.
TEST(DataParallel, EqualsTheReplicasOneAfterTheOther) {
  for (const int replicas : {2, 3}) {
    for (const int micro_batches : {1, 3}) {
      Config config = config_of(replicas);
      test::llama_of(config).tied = false;
      config.pipeline.micro_batches = micro_batches;
      const RunOutcome actual = run(config);

      Config alone = config;
      alone.pipeline.data_parallel = 1;
      Trainer trainer(alone);
      Pipeline& pipeline = trainer.pipeline();
      LoaderOptions reading;
      reading.shuffle = config.data.shuffle;
      reading.seed = config.train.seed;
      Loader loader(trainer.data().train, replicas * micro_batches, config.pipeline.micro_batch_size, reading);
      const StepPlan plan = make_plan(pipeline, trainer.variant(), micro_batches);
      RunOutcome expected;
      for (int step = 1; step <= kSteps; ++step) {
        const Batch batch = loader.next();
        std::vector<at::Tensor> sums;
        double loss = 0;
        for (int replica = 0; replica < replicas; ++replica) {
          StepRequest options;
          options.seed = config.train.seed;
          options.step = step;
          options.first_micro_batch = int64_t{replica} * micro_batches;
          options.loss.weight = 1.0 / static_cast<double>(batch.targets);
          const auto first = batch.micro_batches.begin() + options.first_micro_batch;
          loss += pipeline.run(plan, {first, first + micro_batches}, options).loss;
          for (size_t w = 0; w < trainer.weights().size(); ++w) {
            Parameter& weight = *trainer.weights()[w];
            if (replica == 0) {
              sums.push_back(weight.grad.clone());
            } else {
              sums[w] = sums[w] + weight.grad;
            }
            weight.forget_grad();
          }
        }
        for (size_t w = 0; w < sums.size(); ++w) trainer.weights()[w]->grad_to_add().copy_(sums[w]);
        UpdateResult result = trainer.update().begin(false);
        pipeline.on_ranks([&](int rank) { trainer.update().run(rank, step, config.optimizer.lr, result); });
        trainer.update().finish(step, {}, result);
        expected.losses.push_back(loss);
        expected.norms.push_back(result.grad_norm);
      }
      for (const Parameter* weight : trainer.weights()) {
        expected.weights[weight->name()] = weight->master.clone();
      }
      expect_same_run(expected, actual, concat(replicas, " replicas of ", micro_batches, " micro-batches"));
    }
  }
}

TEST(DataParallel, WaitsForSumsCountAsTail) {
  const Config config = config_of(2);
  const RunOutcome outcome = run(config);
  for (const RankTimes& times : outcome.reports.back().ranks) {
    EXPECT_GT(times.exposed, 0);
    EXPECT_LE(times.exposed, times.idle[static_cast<int>(IdleCause::kTail)]);
  }
  Config one = config;
  one.pipeline.data_parallel = 1;
  const RunOutcome alone = test::run_alone(one, 1);
  for (const RankTimes& times : alone.reports.back().ranks) EXPECT_EQ(times.exposed, 0);
}

using Cuts = std::vector<std::vector<Cut>>;

// The numbers of each replica. Expects that the cuts of each parameter follow each other.
std::vector<int64_t> loads_of(const std::vector<UpdateCost>& costs, int replicas) {
  std::vector<int64_t> loads(replicas, 0);
  const Cuts cuts = share_out(costs, replicas);
  EXPECT_EQ(cuts.size(), costs.size());
  for (size_t i = 0; i < cuts.size(); ++i) {
    int64_t end = 0;
    std::set<int> owners;
    for (const Cut& cut : cuts[i]) {
      EXPECT_EQ(cut.begin, end) << i;
      EXPECT_LT(cut.begin, cut.end) << i;
      EXPECT_TRUE(cut.end % costs[i].unit == 0 || cut.end == costs[i].numbers) << i;
      EXPECT_TRUE(owners.insert(cut.owner).second) << i << ": two pieces of one replica";
      end = cut.end;
      loads.at(cut.owner) += cut.end - cut.begin;
    }
    EXPECT_EQ(end, costs[i].numbers) << i;
  }
  return loads;
}

TEST(OptimizerShards, CutParametersIntoEqualShares) {
  EXPECT_EQ(share_out({}, 2), Cuts());
  EXPECT_EQ(share_out({{7}}, 1), (Cuts{{{0, 0, 7}}}));
  EXPECT_EQ(share_out({{12, 0, 4}}, 3), (Cuts{{{0, 0, 4}, {1, 4, 8}, {2, 8, 12}}}));
  EXPECT_EQ(share_out({{3, 0, 4}}, 3), (Cuts{{{1, 0, 3}}})) << "whole, nearest to its middle";
  // The last first.
  EXPECT_EQ(share_out({{8, 0, 4}, {8, 0, 4}}, 2), (Cuts{{{1, 0, 8}}, {{0, 0, 8}}}));
  EXPECT_EQ(share_out({{20, 0, 4}, {4, 0, 4}}, 2), (Cuts{{{0, 0, 8}, {1, 8, 20}}, {{0, 0, 4}}}));
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    const int replicas = 1 + static_cast<int>(random() % 9);
    std::vector<UpdateCost> costs;
    int64_t most = 0;
    for (uint32_t i = 1 + random() % 30; i > 0; --i) {
      costs.push_back({1 + static_cast<int64_t>(random() % 5000), 0, 1 + static_cast<int64_t>(random() % 100)});
      most = std::max(most, std::min(costs.back().unit, costs.back().numbers));
    }
    const std::vector<int64_t> loads = loads_of(costs, replicas);
    const auto [least, largest] = std::ranges::minmax_element(loads);
    EXPECT_LE(*largest - *least, 2 * most) << round;
  }
}

// The matrices, whose updates take long, stay whole. The rest makes up for them.
TEST(OptimizerShards, ShareTheUpdatesThatTakeLong) {
  const std::vector<UpdateCost> costs = {{1000}, {40, 160}, {40, 160}, {80, 320}, {10}, {30, 120}, {30, 120}};
  const Cuts cuts = share_out(costs, 2);
  const std::vector<int> owners = {0, 1, 1, 0, 0, 0, 1};
  for (const size_t i : {1, 2, 3, 5, 6}) EXPECT_EQ(cuts[i], (std::vector<Cut>{{owners[i], 0, costs[i].numbers}})) << i;
  EXPECT_EQ(loads_of(costs, 2), (std::vector<int64_t>{615, 615}));
}

// 64 replicas of a model of 7B in 8 stages: every replica has as many numbers as the others.
TEST(OptimizerShards, AreEqualForAModelOfSevenBillion) {
  Config config;
  DecoderOptions& llama = test::llama_of(config);
  llama.dim = 4096;
  llama.layers = 32;
  llama.heads = llama.kv_heads = 32;
  llama.hidden = 11008;
  llama.vocab = 32000;
  const ModelSpec model = build_model(config);
  const size_t layers = model.layers.size();
  int64_t all = 0;
  for (size_t stage = 0; stage < 8; ++stage) {
    std::vector<UpdateCost> costs;
    for (size_t i = stage * layers / 8; i < (stage + 1) * layers / 8; ++i) {
      const auto layer = model.layers[i].make();  // allocates nothing
      for (const Parameter* parameter : parameters_of(*layer)) costs.push_back({parameter->numel(), 0, kSquareBlock});
    }
    const std::vector<int64_t> loads = loads_of(costs, 64);
    const int64_t sum = std::accumulate(loads.begin(), loads.end(), int64_t{0});
    all += sum;
    EXPECT_LE(static_cast<double>(*std::ranges::max_element(loads)), 1.05 * static_cast<double>(sum) / 64) << stage;
  }
  EXPECT_NEAR(static_cast<double>(all), 6.74e9, 1e7);
}

// These are the bytes of optimizer state of all ranks of a replica, and the names of the parameters to which it
// belongs.
struct State {
  int64_t bytes = 0;
  std::vector<std::string> names;
};

std::vector<State> states_of(const Config& config) {
  std::vector<State> states(config.pipeline.data_parallel);
  run_worlds(make_in_process_worlds(config.pipeline.data_parallel, 2, kNoSpin), [&](World world) {
    State& state = states[world.replica];
    Trainer trainer(config, std::move(world));
    trainer.step();
    for (int rank = 0; rank < 2; ++rank) {
      const MemoryUse use = trainer.pipeline().meter().rank_use(rank);
      state.bytes += use.now[static_cast<int>(MemoryCategory::kOptimizer)];
    }
    for (const LiveTensor& tensor : trainer.update().live_optimizer_state()) {
      state.names.push_back(tensor.name);
    }
  });
  return states;
}

TEST(OptimizerShards, EachReplicaHoldsItsShare) {
  Config config = config_of(2);
  test::llama_of(config).tied = false;
  const std::vector<State> whole = states_of(config);
  EXPECT_EQ(whole[0].bytes, whole[1].bytes);
  EXPECT_EQ(whole[0].names, whole[1].names);
  config.optimizer.shard = true;
  const std::vector<State> shards = states_of(config);
  // Besides its share, a replica has a counter of steps per rank.
  EXPECT_NEAR(shards[0].bytes + shards[1].bytes, whole[0].bytes, 256);
  EXPECT_LT(std::max(shards[0].bytes, shards[1].bytes), 0.6 * whole[0].bytes);
  std::vector<std::string> names = shards[0].names;
  names.insert(names.end(), shards[1].names.begin(), shards[1].names.end());
  std::vector<std::string> expected = whole[0].names;
  std::sort(names.begin(), names.end());
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(names, expected);  // each on one replica, as none is large enough to be cut
}

// 2 bytes of a weight, 4 of its gradient, and of each weight's master and AdamW's state 12 on one replica.
TEST(OptimizerShards, KeepMastersOnOneReplica) {
  for (const int replicas : {2, 4}) {
    Config config = config_of(replicas);
    test::llama_of(config).tied = false;
    test::llama_of(config).dim = 64;
    test::llama_of(config).hidden = 512;
    config.train.precision = "bf16";
    config.optimizer.shard = true;
    run_worlds(make_in_process_worlds(replicas, 2, kNoSpin), [&](World world) {
      Trainer trainer(config, std::move(world));
      const auto bytes_of_a_weight = [&] {
        int64_t bytes = 0;
        for (int rank = 0; rank < 2; ++rank) {
          const MemoryUse use = trainer.pipeline().meter().rank_use(rank);
          for (const MemoryCategory category :
               {MemoryCategory::kParameters, MemoryCategory::kGradients, MemoryCategory::kOptimizer})
            bytes += use.now[static_cast<int>(category)];
        }
        return static_cast<double>(bytes) / static_cast<double>(trainer.update().numel());
      };
      EXPECT_NEAR(bytes_of_a_weight(), 6 + 12.0 / replicas, 0.5) << replicas << " replicas, before the first step";
      trainer.step();
      EXPECT_NEAR(bytes_of_a_weight(), 6 + 12.0 / replicas, 0.5) << replicas << " replicas";
    });
  }
}

// Each replica counts its own memory, and releases memory that another replica handed over.
TEST(DataParallel, ReleasesTheMemoryOfAStep) {
  const Config config = config_of(2);
  run_worlds(make_in_process_worlds(2, 2, kNoSpin), [&](World world) {
    Trainer trainer(config, std::move(world));
    const auto bytes_after_step = [&] {
      trainer.step();
      barrier(*trainer.pipeline().world().processes,
              config.pipeline.timeout);  // the other process has read everything
      std::vector<int64_t> bytes;
      for (int rank = 0; rank < 2; ++rank) {
        const MemoryUse use = trainer.pipeline().meter().rank_use(rank);
        bytes.insert(bytes.end(), use.now.begin(), use.now.end());
      }
      return bytes;
    };
    const std::vector<int64_t> first = bytes_after_step();
    for (int step = 0; step < 5; ++step) EXPECT_EQ(bytes_after_step(), first) << "replica " << trainer.world().replica;
    int64_t gradients = 0;
    int64_t parameters = 0;
    for (int stage = 0; stage < 2; ++stage) {
      for (int i = 0; i < trainer.pipeline().stage(stage).layer_count(); ++i) {
        for (const Parameter* parameter : trainer.pipeline().stage(stage).parameters(i)) {
          gradients += static_cast<int64_t>(parameter->grad.nbytes());
          ++parameters;
        }
      }
    }
    const auto category = static_cast<size_t>(MemoryCategory::kGradients);
    EXPECT_NEAR(first[category] + first[kMemoryCategories + category], gradients, 64 * parameters);
  });
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
