// Tests replicas that share the experts of each layer (pipeline.experts). Losses, norms, weights and the optimizer's
// state have the bits of replicas that hold all experts, however many share them.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>
#include <tuple>

#include <gtest/gtest.h>

#include "tests/expect_error.h"
#include "tests/free_port.h"
#include "tests/train/family_config.h"
#include "tests/train/helpers.h"
#include "tests/train/worlds.h"
#include "twobp/models/decoder/options.h"
#include "twobp/models/model_weights.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/profile/profile.h"
#include "twobp/pipeline/step_plan.h"
#include "twobp/schedule/simulate/simulate.h"
#include "twobp/train/build_model.h"
#include "twobp/train/checkpoint/checkpointer.h"
#include "twobp/train/update/update.h"
#include "twobp/train/variant.h"
#include "twobp/train/weights/save_model.h"
#include "twobp/train/weights/weight_files.h"
#include "twobp/transport/start.h"
#include "twobp/transport/store/store_connection.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_error;
using test::same_bits;

constexpr int kSteps = 3;

struct Training {
  std::vector<double> losses;
  std::vector<double> norms;
  std::vector<int> skipped;
  std::vector<Evaluation> evaluations;
  std::map<std::string, at::Tensor> tensors;  // weights and optimizer state of all replicas, by their parts
  std::vector<StepReport> reports;            // of the first replica
};

using Begin = std::function<void(Trainer& trainer)>;

// With save.checkpoints, the run continues from the newest one, and leaves one at its end.
Training run_in(std::vector<World> worlds, const Config& config, int64_t until = kSteps, const Begin& begin = {}) {
  Training result;
  std::mutex mutex;
  run_worlds(std::move(worlds), [&](World world) {
    const int process = world.process();
    const Processes processes(*world.processes, config.pipeline.timeout);
    std::optional<Checkpointer> checkpointer;
    if (!config.save.checkpoints.empty()) checkpointer.emplace(config.save, /*resume=*/true, processes);
    Trainer trainer(config, std::move(world));
    if (checkpointer) checkpointer->resume(trainer);
    if (begin) begin(trainer);
    Training own;
    trainer.run_ahead_until(until);
    while (trainer.steps_done() < until) {
      StepResult step = trainer.step();
      own.losses.push_back(step.loss);
      own.norms.push_back(step.grad_norm);
      own.skipped.push_back(step.skipped ? 1 : 0);
      own.reports.push_back(std::move(step.report));
    }
    if (const auto held_out = trainer.evaluate()) own.evaluations.push_back(*held_out);
    if (checkpointer) checkpointer->finish(trainer);
    std::vector<LiveTensor> all = trainer.update().live_weights();
    for (LiveTensor& one : trainer.update().live_optimizer_state()) all.push_back(one);
    const std::lock_guard lock(mutex);
    for (const LiveTensor& one : all) {
      const auto [at, is_new] = result.tensors.try_emplace(one.name, one.tensor.clone());
      EXPECT_TRUE(is_new || same_bits(at->second, one.tensor)) << one.name << " differs on process " << process;
    }
    if (process != 0) return;
    own.tensors = std::move(result.tensors);
    result = std::move(own);
  });
  return result;
}

std::vector<World> threads_of(const Config& config) {
  return make_in_process_worlds(config.pipeline.data_parallel, config.pipeline.ranks, 0);
}

Training run(const Config& config, const Begin& begin = {}) {
  return run_in(threads_of(config), config, kSteps, begin);
}

// Odd sizes, so that no kernel's vectors fit.
Config config_of(const std::string& family, int replicas, int experts, const std::vector<std::string>& more = {}) {
  std::vector<std::string> keys = {"model.hidden=13",
                                   "model.experts=8",
                                   "model.experts_per_token=3",
                                   "pipeline.ranks=1",
                                   "pipeline.micro_batches=4",
                                   "train.clip_norm=0.3",
                                   concat("pipeline.data_parallel=", replicas),
                                   concat("pipeline.experts=", experts)};
  if (family == "qwen2_moe") keys.emplace_back("model.shared_hidden=11");
  if (family == "gpt_oss") keys.emplace_back("model.hidden=16");  // for its biases
  keys.insert(keys.end(), more.begin(), more.end());
  Config config = test::family_config(decoder_family(family), 1, keys);
  config.pipeline.timeout = 60;
  return config;
}

void expect_same(const Training& expected, const Training& actual, const std::string& what) {
  test::expect_same_numbers(expected, actual, what);
  EXPECT_EQ(expected.evaluations, actual.evaluations) << what;
  ASSERT_EQ(expected.tensors.size(), actual.tensors.size()) << what;
  for (const auto& [name, tensor] : expected.tensors) {
    ASSERT_TRUE(actual.tensors.contains(name)) << what << ": " << name;
    EXPECT_TRUE(same_bits(tensor, actual.tensors.at(name))) << what << ": " << name << " differs";
  }
}

Config with(Config config, const std::function<void(Config&)>& change) {
  change(config);
  return config;
}

TEST(ExpertGroups, TheBitsDoNotDependOnTheirSize) {
  for (const std::string family : {"qwen3_moe", "qwen2_moe", "granitemoe", "gpt_oss", "deepseek_v3"}) {
    for (const int replicas : {2, 4}) {
      const Training expected = run(config_of(family, replicas, 1, {"pipeline.p2=off"}));
      for (int experts = 2; experts <= replicas; experts *= 2) {
        for (const char* p2 : {"off", "fill"}) {
          expect_same(expected, run(config_of(family, replicas, experts, {concat("pipeline.p2=", p2)})),
                      concat(family, ", ", replicas, " replicas, experts ", experts, ", p2 ", p2));
        }
      }
    }
  }
}

TEST(ExpertGroups, TheBitsDoNotDependOnTheSchedule) {
  const auto of = [](int experts, const std::vector<std::string>& more) {
    std::vector<std::string> keys = {"pipeline.ranks=2", "pipeline.stages=0"};
    keys.insert(keys.end(), more.begin(), more.end());
    return config_of("qwen3_moe", 2, experts, keys);
  };
  const Training expected = run(of(1, {"pipeline.schedule=gpipe", "pipeline.p2=off"}));
  for (const std::string schedule : {"gpipe", "1f1b", "zb-h1", "zb-v"})
    expect_same(expected, run(of(2, {"pipeline.schedule=" + schedule})), schedule);
  expect_same(expected, run(of(2, {"pipeline.schedule=1f1b", "pipeline.memory_cap=1"})), "a cap");
  expect_same(expected, run(of(2, {"pipeline.schedule=1f1b", "pipeline.bucket=1GiB"})), "one bucket");
  expect_same(expected, run(of(2, {"pipeline.schedule=1f1b", "pipeline.recompute=[\"activations\"]"})), "recomputed");
  expect_same(expected, run(of(2, {"pipeline.schedule=1f1b", "pipeline.run_ahead=on"})), "run ahead");
}

// The settings that see who holds what: state in shards, running means, precisions, no clipping, frozen weights.
TEST(ExpertGroups, OtherUpdatesKeepTheBits) {
  const std::vector<std::pair<std::string, std::function<void(Config&)>>> changes = {
      {"no clipping", [](Config& c) { c.train.clip_norm = 0; }},
      {"shards", [](Config& c) { c.optimizer.shard = true; }},
      {"shards, no clipping",
       [](Config& c) {
         c.optimizer.shard = true;
         c.train.clip_norm = 0;
       }},
      {"means, evaluated",
       [](Config& c) {
         c.optimizer.average = 0.5;
         c.data.held_out = 0.125;
         c.train.eval_batches = 2;
       }},
      {"momentum",
       [](Config& c) {
         c.optimizer.type = "sgd";
         c.optimizer.momentum = 0.9;
       }},
      {"muon", [](Config& c) { c.optimizer.type = "muon"; }},
      {"muon, shards",
       [](Config& c) {
         c.optimizer.type = "muon";
         c.optimizer.shard = true;
       }},
      {"bf16", [](Config& c) { c.train.precision = "bf16"; }},
      {"fp16",
       [](Config& c) {
         c.train.precision = "fp16";
         c.train.loss_scale = 1e9;
       }},
      {"adapters",
       [](Config& c) {
         c.model.lora = 4;
         c.model.lora_targets = {"o_proj", "experts.gate_up_proj", "experts.down_proj"};
       }},
      {"frozen experts", [](Config& c) { c.model.freeze = {"model.layers.1.*experts.*"}; }}};
  for (const auto& [what, change] : changes) {
    const Training expected = run(with(config_of("qwen2_moe", 4, 1), change));
    expect_same(expected, run(with(config_of("qwen2_moe", 4, 2), change)), what);
  }
}

// A streamed gradient of experts has a part for each replica until it is summed, and no memory after it is applied.
TEST(ExpertGroups, StreamedGradientsKeepTheBits) {
  const Begin is_streamed = [](Trainer& trainer) {
    for (const Parameter* weight : trainer.weights()) {
      EXPECT_TRUE(weight->streams_grad() || weight->is_buffer()) << weight->name();
      EXPECT_FALSE(weight->grad.defined() || weight->grad_by_source.defined()) << weight->name();
    }
  };
  for (const std::string family : {"qwen2_moe", "gpt_oss"}) {
    std::vector<std::string> keys = {"train.clip_norm=0", "pipeline.stages=0"};
    const Training expected = run(config_of(family, 4, 1, keys));
    keys.push_back("pipeline.gradients=streamed");
    for (const bool shards : {false, true}) {
      keys.push_back(concat("optimizer.shard=", shards ? "true" : "false"));
      keys.push_back(concat("pipeline.ranks=", shards ? 1 : 2));
      for (const int experts : {2, 4})
        expect_same(expected, run(config_of(family, 4, experts, keys), is_streamed),
                    concat(family, ", e ", experts, shards ? ", shards" : ", two ranks"));
    }
  }
}

// All scores are equal, so every token has the same experts: the others, and a replica, get no token.
TEST(ExpertGroups, AllTokensMayGoToOneReplica) {
  const Begin begin = [](Trainer& trainer) {
    for (Parameter* weight : trainer.weights()) {
      if (weight->name().find(".gate.weight") == std::string::npos || weight->experts() > 0) continue;
      weight->master.zero_();
      weight->refresh_value();
    }
  };
  const std::vector<std::string> still = {"optimizer.lr=1e-30"};
  const Training expected = run(config_of("qwen3_moe", 4, 1, still), begin);
  EXPECT_NE(expected.losses, run(config_of("qwen3_moe", 4, 1, still)).losses) << "the routers were not changed";
  for (const int experts : {2, 4})
    expect_same(expected, run(config_of("qwen3_moe", 4, experts, still), begin), concat(experts));
  const Training learns = run(config_of("qwen3_moe", 4, 1), begin);
  expect_same(learns, run(config_of("qwen3_moe", 4, 4), begin), "learning");
}

class Wants : public Observer {
 public:
  bool wants_events(int64_t /*step*/) const override { return true; }
  void on_step(const StepReport& /*report*/) override {}
};

// Without a pipeline, the next F runs while F and I wait for tokens.
TEST(ExpertGroups, FTakesTurns) {
  const auto of = [](int experts, const std::vector<std::string>& more) {
    std::vector<std::string> keys = {"data.held_out=0.125", "train.eval_batches=2"};
    keys.insert(keys.end(), more.begin(), more.end());
    return config_of("deepseek_v3", 4, experts, keys);
  };
  const Training expected = run(of(1, {"pipeline.p2=off"}));
  for (const std::string schedule : {"gpipe", "1f1b"}) {
    for (const std::string cap : {"0", "auto"}) {
      const Config config = of(4, {"pipeline.schedule=" + schedule, "pipeline.memory_cap=" + cap});
      const Training actual = run(config, [](Trainer& trainer) { trainer.add_observer(std::make_shared<Wants>()); });
      expect_same(expected, actual, schedule + ", cap " + cap);
      int turns = 0;
      for (const StepReport& report : actual.reports) {
        const Event* before = nullptr;
        for (const Event& event : report.events[0]) {
          if (event.kind != Event::Kind::kForward && event.kind != Event::Kind::kBackwardP1) continue;
          const bool other = before != nullptr &&
                             std::pair(before->kind, before->micro_batch) != std::pair(event.kind, event.micro_batch);
          if (other && event.part > 0) ++turns;
          before = &event;
        }
      }
      EXPECT_TRUE(turns > 0 || cap != "0") << schedule;
    }
  }
}

// W of other layers and micro-batches runs within F and I, while these wait for tokens.
TEST(ExpertGroups, WRunsWhileTokensTravel) {
  const auto count = [](const char* p2) {
    const Config config = config_of("qwen3_moe", 2, 2, {"pipeline.schedule=1f1b", concat("pipeline.p2=", p2)});
    const Training result = run(config, [](Trainer& trainer) { trainer.add_observer(std::make_shared<Wants>()); });
    int within = 0;
    double idle = 0;
    for (const StepReport& report : result.reports) {
      const std::vector<Event>& events = report.events[0];
      for (size_t i = 1; i < events.size(); ++i) {
        const bool paused = events[i].kind != Event::Kind::kBackwardP2 && events[i].part > 0;
        if (paused && events[i - 1].kind == Event::Kind::kBackwardP2) ++within;
      }
      idle += report.ranks[0].idle[static_cast<int>(IdleCause::kExperts)];
    }
    return std::pair(within, idle);
  };
  const auto [filled, idle_filled] = count("fill");
  EXPECT_GT(filled, 0);
  EXPECT_GE(idle_filled, 0);
  const auto [off, idle_off] = count("off");
  EXPECT_GT(idle_off, 0) << "the wait has a cause of its own";
}

// Reports count the tokens of all replicas, once each, wherever the experts are.
TEST(ExpertGroups, CountTokens) {
  const std::vector<std::string> pipeline = {"pipeline.ranks=2", "pipeline.stages=0", "pipeline.schedule=1f1b"};
  const auto counts_of = [&](int experts, const std::vector<std::string>& more) {
    std::vector<std::string> keys = pipeline;
    keys.insert(keys.end(), more.begin(), more.end());
    std::vector<std::pair<std::string, std::vector<int64_t>>> counts;
    for (const StepReport& report : run(config_of("qwen2_moe", 2, experts, keys)).reports) {
      for (const ExpertTokens& layer : report.experts) {
        counts.emplace_back(layer.layer, layer.tokens);
        const int64_t fullest = *std::max_element(layer.tokens.begin(), layer.tokens.end());
        const int64_t all = std::accumulate(layer.tokens.begin(), layer.tokens.end(), int64_t{0});
        EXPECT_DOUBLE_EQ(layer.imbalance(), static_cast<double>(8 * fullest) / static_cast<double>(all));
      }
    }
    return counts;
  };
  const auto expected = counts_of(1, {"pipeline.p2=off"});
  const Config config = config_of("qwen2_moe", 2, 1, pipeline);
  const auto blocks = static_cast<size_t>(config.model.type.as<DecoderOptions>().layers);
  ASSERT_EQ(expected.size(), kSteps * blocks);
  EXPECT_EQ(expected[0].first, "model.layers.0.mlp");
  const int64_t tokens = 2 * 4 * config.pipeline.micro_batch_size * config.data.sequence;
  for (const auto& [layer, of_experts] : expected) {
    ASSERT_EQ(of_experts.size(), 8u) << layer;
    EXPECT_EQ(std::accumulate(of_experts.begin(), of_experts.end(), int64_t{0}), 3 * tokens) << layer;
  }
  EXPECT_NE(expected.front(), expected[blocks]) << "weights and tokens have changed";
  EXPECT_EQ(expected, counts_of(2, {}));
  EXPECT_EQ(expected, counts_of(2, {"pipeline.recompute=[\"activations\"]"}));
  EXPECT_EQ(expected, counts_of(1, {"pipeline.recompute=[\"both\"]"}));
  EXPECT_EQ(expected, counts_of(1, {"pipeline.run_ahead=on"}));
  EXPECT_TRUE(run(with(test::tiny_config(), [](Config& c) { c.pipeline.ranks = 1; })).reports[0].experts.empty());
}

// The correction of each expert's score follows the counts of a step, wherever the experts are.
TEST(ExpertGroups, CountsMoveCorrections) {
  for (const std::string more : {"train.precision=fp32", "pipeline.run_ahead=on", "train.precision=fp16",
                                 "pipeline.recompute=[\"activations\"]"}) {
    std::vector<std::string> keys = {"pipeline.ranks=2", "pipeline.stages=0", "pipeline.schedule=1f1b", more};
    if (more.ends_with("fp16")) keys.emplace_back("train.loss_scale=1e9");  // skips steps, which change nothing
    const Training expected = run(config_of("deepseek_v3", 3, 1, keys));
    std::map<std::string, at::Tensor> corrections;
    for (size_t step = 0; step < kSteps; ++step) {
      for (const ExpertTokens& layer : expected.reports[step].experts) {
        const std::string name = layer.layer + ".gate.e_score_correction_bias";
        at::Tensor& correction = corrections.try_emplace(name, at::zeros({8})).first->second;
        const int64_t all = std::accumulate(layer.tokens.begin(), layer.tokens.end(), int64_t{0});
        for (int64_t i = 0; i < 8 && expected.skipped[step] == 0; ++i) {
          const int64_t above = 8 * layer.tokens[static_cast<size_t>(i)] - all;
          correction[i] -= 0.01F * static_cast<float>((above > 0) - (above < 0));
        }
      }
    }
    EXPECT_EQ(std::accumulate(expected.skipped.begin(), expected.skipped.end(), 0) > 0, more.ends_with("fp16")) << more;
    ASSERT_FALSE(corrections.empty());
    for (const auto& [name, correction] : corrections) {
      ASSERT_TRUE(expected.tensors.contains(name)) << name;
      EXPECT_TRUE(same_bits(expected.tensors.at(name), correction)) << more << ": " << name;
    }
    if (more.ends_with("fp32"))
      expect_same(expected, run(config_of("deepseek_v3", 3, 1, {"pipeline.ranks=1"})), "alone");
  }
}

// Corrections that are frozen stay, and a rate that moves none is a mistake.
TEST(ExpertGroups, FrozenCorrectionsStay) {
  const auto corrections_of = [](const std::vector<std::string>& keys) {
    const Training result = run(config_of("deepseek_v3", 2, 2, keys));
    std::map<std::string, bool> moved;
    for (const auto& [name, tensor] : result.tensors) {
      if (name.ends_with("e_score_correction_bias")) moved[name] = tensor.any().item<bool>();
    }
    return moved;
  };
  using Moved = std::map<std::string, bool>;
  const std::string first = "model.layers.1.mlp.gate.", second = "model.layers.2.mlp.gate.";
  const std::string bias = "e_score_correction_bias";
  EXPECT_EQ(corrections_of({}), (Moved{{first + bias, true}, {second + bias, true}}));
  for (const std::string& name : {bias, std::string("*")})
    EXPECT_EQ(corrections_of({"model.freeze=" + first + name}), (Moved{{first + bias, false}, {second + bias, true}}));
  EXPECT_EQ(corrections_of({"model.freeze=*.gate.weight"}), (Moved{{first + bias, true}, {second + bias, true}}));
  const std::vector<std::string> parts = {"model.balance_rate", "freezes the biases of all routers", "set it to 0"};
  expect_error([&] { corrections_of({"model.freeze=*e_score*"}); }, parts);
  expect_error([&] { corrections_of({"model.lora=2", "model.lora_targets=o_proj"}); }, parts);
  expect_error([&] { corrections_of({"model.dense_layers=3"}); },
               {"model.balance_rate is 0.01", "none of the 3 blocks has experts", "model.dense_layers (3)"});
}

// The next F counts its tokens while an I waits, which computes its F again.
TEST(ExpertGroups, CountsOfTurnsMoveCorrections) {
  const auto of = [](int experts, const std::string& cap) {
    return load_config("", {"model.type=deepseek_v3",
                            "model.layers=2",
                            "model.dim=64",
                            "model.heads=2",
                            "model.hidden=16",
                            "model.experts=8",
                            "model.experts_per_token=1",
                            "model.balance_rate=0.1",
                            "model.init_std=0.2",
                            "data.sequence=10",
                            "data.synthetic=tokens",
                            "data.held_out=0",
                            "train.steps=3",
                            "pipeline.data_parallel=2",
                            "pipeline.ranks=1",
                            "pipeline.schedule=1f1b",
                            "pipeline.micro_batches=8",
                            "pipeline.micro_batch_size=2",
                            "pipeline.pin=false",
                            "pipeline.recompute=[\"activations\"]",
                            concat("pipeline.experts=", experts),
                            "pipeline.memory_cap=" + cap});
  };
  for (const std::string cap : {"0", "auto"}) expect_same(run(of(1, cap)), run(of(2, cap)), "cap " + cap);
}

// What a plan is told of exchanges: F and I send as many bytes, and back as many as come.
TEST(ExpertGroups, AreMeasured) {
  MeasureOptions options;
  options.seconds = 0.01;
  options.recompute = {"none", "activations"};
  const auto experts_of = [&](int experts) {
    const CostModel costs = measure_costs(config_of("qwen2_moe", 2, experts), options);
    EXPECT_EQ(costs.kinds.at("embedding").at_size[0].forward_to_experts, 0);
    const KindCosts& kind = costs.kinds.at("experts");
    return std::tuple(kind.at_size[0], costs.kinds.at("experts+activations").at_size[0], kind.gradient_bytes);
  };
  const auto [alone, again_alone, gradients_alone] = experts_of(1);
  EXPECT_EQ(alone.forward_to_experts + alone.p1_to_experts + alone.p1_from_experts + again_alone.p1_to_experts, 0);
  const auto [shared, again, gradients] = experts_of(2);
  EXPECT_EQ(gradients, gradients_alone) << "half as many experts, with two parts";
  EXPECT_GT(shared.expert_gradient, gradients / 2);
  EXPECT_LT(shared.expert_gradient, gradients);
  EXPECT_EQ(alone.expert_gradient, 0);
  const Config config = config_of("qwen2_moe", 2, 2);
  const double dim = 4.0 * static_cast<double>(config.model.type.as<DecoderOptions>().dim);
  EXPECT_GT(shared.forward_from_experts, 0);
  EXPECT_EQ(std::fmod(shared.forward_from_experts, dim), 0) << "whole rows";
  const double rows = shared.forward_from_experts / dim;
  EXPECT_EQ(shared.p1_from_experts, rows * (dim + 4)) << "and the gradients of their weights";
  EXPECT_GT(shared.forward_to_experts, shared.p1_to_experts) << "places and weights";
  EXPECT_GT(shared.beside_experts, 0) << "shared experts";
  EXPECT_EQ(again.forward_to_experts, shared.forward_to_experts);
  EXPECT_EQ(again.p1_to_experts, shared.p1_to_experts + shared.forward_to_experts + shared.forward_from_experts);
}

// Expects the peak of a step within 1 % of the simulation's.
void expect_simulated_peak(Trainer& trainer, const std::string& what) {
  trainer.step();
  const StepPlan plan = make_plan(trainer.pipeline(), trainer.variant(), trainer.config().pipeline.micro_batches);
  SimulationOptions options = simulation_of(plan);
  options.data_parallel.replicas = trainer.pipeline().world().replicas;
  const Simulation simulation = simulate(plan.schedule, profiled_costs(trainer.pipeline().layer_costs()), options);
  const MemoryUse use = trainer.step().report.rank_memory[0];
  const double predicted = static_cast<double>(use.total()) + simulation.ranks[0].peak_bytes;
  EXPECT_NEAR(static_cast<double>(use.peak), predicted, 0.01 * predicted) << what;
}

// The simulation knows the peak of each rank within 1 %. Each token has all experts, so that all replicas have as many
// rows, and W runs in no wait, which lasts as long as it happens to.
TEST(ExpertGroups, TakeTheBytesThatAreSimulated) {
  for (const int experts : {1, 2}) {
    for (const int micro_batches : {2, 4}) {
      for (const std::string p2 : {"off", "end"}) {
        Config config = config_of("qwen3_moe", experts, experts,
                                  {"model.dim=120", "model.hidden=96", "model.experts_per_token=8",
                                   "pipeline.memory_cap=0", "pipeline.schedule=1f1b", "pipeline.p2=" + p2,
                                   concat("pipeline.micro_batches=", micro_batches), "pipeline.micro_batch_size=4"});
        run_worlds(threads_of(config), [&](World world) {
          Trainer trainer(config, std::move(world));
          expect_simulated_peak(trainer, concat("experts ", experts, ", M ", micro_batches, ", p2 ", p2));
        });
      }
    }
  }
}

// A streamed gradient has parts for each replica only while W of its layer runs, whose bytes are those of all experts.
TEST(ExpertGroups, StreamedGradientsTakeTheBytesThatAreSimulated) {
  for (const int experts : {1, 2, 4}) {
    const Config config = config_of(
        "qwen3_moe", experts, experts,
        {"model.dim=120", "model.hidden=96", "model.experts_per_token=8", "train.clip_norm=0", "pipeline.memory_cap=0",
         "pipeline.schedule=1f1b", "pipeline.p2=end", "pipeline.gradients=streamed", "pipeline.micro_batch_size=4"});
    run_worlds(threads_of(config), [&](World world) {
      Trainer trainer(config, std::move(world));
      expect_simulated_peak(trainer, concat("experts ", experts));
    });
  }
}

// A checkpoint is continued by groups of another size, to the bit.
TEST(ExpertGroups, AnotherSizeResumes) {
  for (const auto& [before, after] : {std::pair{2, 1}, {1, 2}, {2, 4}}) {
    test::TempFolder folder;
    const auto of = [&](int experts) { return config_of("qwen3_moe", 4, experts, {"train.steps=4"}); };
    const Training expected = run_in(threads_of(of(1)), of(1), 4);
    const auto saved = [&](int experts) {
      return with(of(experts), [&](Config& c) { c.save.checkpoints = folder.path("checkpoints"); });
    };
    const Training first = run_in(threads_of(of(before)), saved(before), 2);
    const Training rest = run_in(threads_of(of(after)), saved(after), 4);
    ASSERT_EQ(rest.losses.size(), 2u);
    Training joined = rest;
    joined.losses.insert(joined.losses.begin(), first.losses.begin(), first.losses.end());
    joined.norms.insert(joined.norms.begin(), first.norms.begin(), first.norms.end());
    expect_same(expected, joined, concat(before, " to ", after));
  }
}

// Each replica writes the experts that it holds, and reads them.
TEST(ExpertGroups, SaveAndLoadAModel) {
  for (const std::string family : {"mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3"}) {
    test::TempFolder folder;
    const auto save = [&](int experts) {
      const std::string to = folder.path(concat(experts));
      const Config config = config_of(family, 4, experts);
      run_worlds(threads_of(config), [&](World world) {
        const Processes processes(*world.processes, config.pipeline.timeout);
        Trainer trainer(config, std::move(world));
        trainer.step();
        save_model(to, trainer.config().model, config.data.sequence, trainer.weights(), {}, processes);
      });
      return to;
    };
    const ModelWeights expected(save(1));
    for (const int experts : {2, 4}) {
      const ModelWeights actual(save(experts));
      ASSERT_EQ(actual.names(), expected.names()) << experts;
      for (const std::string& name : expected.names())
        EXPECT_TRUE(same_bits(actual.tensor(name), expected.tensor(name))) << experts << ": " << name;
    }
    const auto from = [&](int experts) {
      return with(
          load_config(
              "", {"model.from=" + folder.path("4"), "data.synthetic=tokens", concat("data.sequence=", test::kSequence),
                   "data.held_out=0", "pipeline.micro_batches=4", "pipeline.micro_batch_size=2", "pipeline.pin=false",
                   "pipeline.ranks=1", "pipeline.data_parallel=2", concat("pipeline.experts=", experts)}),
          [](Config& c) { c.pipeline.timeout = 60; });
    };
    const Training whole = run(from(1));
    expect_same(whole, run(from(2), [](Trainer& trainer) { EXPECT_TRUE(trainer.unused_tensors().empty()); }), family);
  }
}

// Also adapters, whose files have one tensor for all experts.
TEST(ExpertGroups, SaveAdapters) {
  for (const std::string family : {"mixtral", "gpt_oss"}) {
    test::TempFolder folder;
    const auto save = [&](int experts) {
      const Config config =
          config_of(family, 4, experts, {"model.lora=4", "model.lora_targets=experts.gate_up_proj,experts.down_proj"});
      run_worlds(threads_of(config), [&](World world) {
        const Processes processes(*world.processes, config.pipeline.timeout);
        Trainer trainer(config, std::move(world));
        for (int step = 0; step < 2; ++step) trainer.step();
        save_adapter(folder.path(concat(experts)), trainer.config().model, trainer.weights(), "float32", processes);
      });
      return folder.path(concat(experts));
    };
    const std::string whole = save(1);
    const SafetensorsFile expected(whole + "/adapter_model.safetensors");
    const SafetensorsFile actual(save(2) + "/adapter_model.safetensors");
    ASSERT_EQ(actual.names(), expected.names());
    EXPECT_EQ(expected.names().size(), 3u * 4);
    for (const std::string& name : expected.names())
      EXPECT_TRUE(same_bits(actual.tensor(name), expected.tensor(name))) << name;
    // They are read as they were written, also by replicas that share experts.
    const auto read = [&](int experts) {
      return run(config_of(
          family, 2, experts,
          {"model.lora=4", "model.adapter=" + whole, "model.lora_targets=experts.gate_up_proj,experts.down_proj"}));
    };
    expect_same(read(1), read(2), family);
    Config config = config_of(family, 1, 1, {"model.lora=4"});
    config.model.lora_targets = {"experts.gate_up_proj", "experts.down_proj"};
    Trainer trainer(config);
    load_adapter(whole, config.model, build_model(config.model), trainer.weights());
    save_adapter(folder.path("again"), config.model, trainer.weights(), "float32", {});
    const SafetensorsFile again(folder.path("again/adapter_model.safetensors"));
    for (const std::string& name : expected.names())
      EXPECT_TRUE(same_bits(again.tensor(name), expected.tensor(name))) << name;
  }
}

TEST(ExpertGroups, ThroughTheStore) {
  const Config config = config_of("qwen2_moe", 2, 2);
  const Training expected = run(config_of("qwen2_moe", 2, 1));
  const int port = test::free_port();
  std::vector<std::shared_ptr<Transport>> ends(2);
  const auto connect = [&](int process) {
    StorePlace place;
    place.address = "localhost";
    place.port = port;
    place.rank = process;
    place.size = 2;
    ends[process] = make_store_transport(std::make_shared<StoreConnection>(place, 60));
  };
  std::thread other(connect, 1);
  connect(0);
  other.join();
  std::vector<World> worlds;
  for (auto& end : ends) worlds.push_back(make_process_world(std::move(end), 2, 1));
  expect_same(expected, run_in(std::move(worlds), config), "store");
}

TEST(ExpertGroups, RefuseWhatTheyCannotDo) {
  const auto refused = [](const std::string& family, int replicas, int experts, const std::vector<std::string>& more,
                          const std::vector<std::string>& parts) {
    expect_error([&] { run(config_of(family, replicas, experts, more)); }, parts);
  };
  refused("qwen3_moe", 3, 2, {}, {"pipeline.experts is 2", "pipeline.data_parallel is 3", "multiple"});
  refused("qwen3_moe", 3, 3, {}, {"pipeline.experts is 3", "does not divide the 8 experts"});
  refused("gpt_oss", 4, 4, {"model.hidden=13"}, {"pipeline.experts is 4", "52 numbers", "bias", "multiple of 16"});
  refused("qwen3_moe", 2, 2, {"pipeline.recompute=[\"both\"]"}, {"pipeline.experts is 2", "both"});
  refused("qwen3_moe", 2, 2, {"pipeline.micro_batches=3"}, {"last batch", "4 of 12 samples", "a multiple of 12"});
  Config llama = test::tiny_config();
  llama.pipeline.data_parallel = llama.pipeline.experts = 2;
  llama.pipeline.ranks = 1;
  expect_error([&] { run(llama); }, {"pipeline.experts is 2", "no layer of the model has experts"});
}

// A replica that never reaches an exchange.
TEST(ExpertGroups, NameTheReplicaThatIsMissing) {
  Config config = config_of("qwen3_moe", 2, 2);
  config.pipeline.timeout = 1;
  expect_error(
      [&] {
        run_worlds(threads_of(config), [&](World world) {
          const int replica = world.replica;
          Trainer trainer(config, std::move(world));
          const Batch batch = test::random_batch(4, 2, 2, static_cast<uint64_t>(replica));
          trainer.evaluate(batch, 1);
          if (replica == 0) {
            trainer.evaluate(batch, 2);
          } else {
            std::this_thread::sleep_for(std::chrono::seconds(3));
          }
        });
      },
      {"rank 0 waited", "tokens of experts", "rank 1"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
