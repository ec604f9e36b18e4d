// Tests sequences in slices. Losses, norms and weights equal those of whole sequences within rounding. Also tests how
// sequences are cut, plans and costs of slices. same_bits_test has their schedules.
#include "twobp/pipeline/profile/slices.h"

#include <cmath>
#include <memory>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "tests/plan/support.h"
#include "tests/train/helpers.h"
#include "tests/train/training.h"
#include "twobp/core/measure.h"
#include "twobp/data/data.h"
#include "twobp/models/models.h"
#include "twobp/nn/kernels/rows/operators.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/plan/cost_model.h"
#include "twobp/train/build_model.h"
#include "twobp/train/check_config.h"
#include "twobp/train/checkpoint/checkpoint_format.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_same_bits;
using test::Outcome;

constexpr int kSteps = 3;
const std::vector<std::vector<int>> kLengths = {{5, 11}, {4, 1, 3, 8}};

Config config_of(const std::vector<int>& split, const std::vector<int>& lengths, int ranks = 0) {
  Config config = test::tiny_config();
  config.train.clip_norm = 0.5;
  config.pipeline.stages = static_cast<int>(split.size());
  config.pipeline.ranks = ranks;
  config.pipeline.split = split;
  config.pipeline.slices = std::max<int>(1, static_cast<int>(lengths.size()));
  config.pipeline.slice_lengths = lengths;
  return config;
}

Outcome train(const Config& config, const std::vector<Batch>& batches, const std::string& schedule, P2Policy policy,
              const MemoryCap& cap = MemoryCap::automatic(), P2Batching batching = P2Batching::kLoop) {
  Config with = config;
  with.pipeline.schedule = schedule;
  return test::train(with, batches, {schedule, policy, batching, cap});
}

// A sum over positions is cut in other places, which costs a few roundings of float32.
TEST(Slices, AgreeWithWholeSequences) {
  const auto batches = test::random_batches(kSteps, 2);
  const Outcome whole = train(config_of({3, 5}, {}), batches, "1f1b", P2Policy::kFill);
  for (const auto& lengths : kLengths) {
    const Outcome sliced = train(config_of({3, 5}, lengths), batches, "1f1b", P2Policy::kFill);
    for (int step = 0; step < kSteps; ++step) {
      EXPECT_NEAR(sliced.losses[step], whole.losses[step], 1e-5 * whole.losses[step]) << step;
      EXPECT_NEAR(sliced.norms[step], whole.norms[step], 1e-4 * whole.norms[step]) << step;
    }
    EXPECT_FALSE(test::same_bits(sliced.norms, whole.norms)) << "nothing was cut";
  }
}

TEST(Slices, WorkWithPaddingAndRecomputation) {
  const auto batches = test::padded(test::random_batches(kSteps, 2));
  const Outcome whole = train(config_of({3, 5}, {}), batches, "1f1b", P2Policy::kFill);
  const Outcome sliced = train(config_of({3, 5}, {5, 11}), batches, "1f1b", P2Policy::kFill);
  EXPECT_NEAR(sliced.losses.back(), whole.losses.back(), 1e-5 * whole.losses.back());
  Config again = config_of({3, 5}, {5, 11});
  again.pipeline.recompute = {"activations"};
  expect_same_bits(sliced, train(again, batches, "1f1b", P2Policy::kFill), "recompute activations");
}

TEST(Slices, WorkWithFrozenLayers) {
  const auto batches = test::random_batches(kSteps, 2);
  const auto frozen = [&](const std::vector<int>& lengths, const std::vector<int>& split) {
    Config config = config_of(split, lengths);
    config.model.freeze = {"model.embed*", "model.layers.0.*"};
    return train(config, batches, "1f1b", P2Policy::kFill);
  };
  const Outcome whole = frozen({}, {3, 5});
  const Outcome sliced = frozen({5, 11}, {3, 5});
  EXPECT_NEAR(sliced.losses.back(), whole.losses.back(), 1e-5 * whole.losses.back());
  expect_same_bits(sliced, frozen({5, 11}, {2, 6}), "another split");
}

TEST(Slices, WorkInMamba) {
  Config config = test::tiny_config();
  MambaOptions mamba;
  mamba.dim = 24;
  mamba.layers = 2;
  mamba.vocab = test::kVocab;
  config.model.type = mamba;
  const auto batches = test::random_batches(kSteps, 2);
  config.pipeline.stages = 2;
  config.pipeline.schedule = "1f1b";
  const Outcome whole = test::train(config, batches, {"1f1b", P2Policy::kFill});
  config.pipeline.slices = 4;
  config.pipeline.slice_lengths = {2, 7, 1, 6};
  const Outcome sliced = test::train(config, batches, {"1f1b", P2Policy::kFill});
  for (int step = 0; step < kSteps; ++step) {
    EXPECT_NEAR(sliced.losses[step], whole.losses[step], 1e-5 * whole.losses[step]) << step;
    EXPECT_NEAR(sliced.norms[step], whole.norms[step], 1e-4 * whole.norms[step]) << step;
  }
  config.pipeline.stages = 1;
  expect_same_bits(sliced, test::train(config, batches, {"1f1b", P2Policy::kOff}), "one stage");
}

// Takes longer the earlier the slice is, as no model does.
class SlowStart : public Layer {
 public:
  SlowStart(std::unique_ptr<Layer> layer, double seconds) : layer_(std::move(layer)), seconds_(seconds) {}
  Values forward(Values x, Context& context, Saved& saved) override {
    const double end = now_seconds() + (context.past == 0 ? seconds_ : 0);
    Values y = layer_->forward(std::move(x), context, saved);
    while (now_seconds() < end) {
    }
    return y;
  }
  Values backward_p1(Values dy, Context& context, Saved& saved) override {
    return layer_->backward_p1(std::move(dy), context, saved);
  }
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override { layer_->collect_p2(saved, units); }
  void collect_parameters(std::vector<Parameter*>& parameters) override { layer_->collect_parameters(parameters); }

 private:
  std::unique_ptr<Layer> layer_;
  double seconds_;
};

// Whatever the measured times are, two runs have the same cuts.
TEST(Slices, AreCutByOperationsWhateverTheTimes) {
  Config config = config_of({8}, {});
  config.data.sequence = 512;
  config.pipeline.slices = 4;
  const ProfiledBatch batch(test::random_fields(1, 3, 512));
  const auto cuts = [&](double seconds, int threads) {
    ModelSpec model = build_model(config.model);
    for (LayerSpec& layer : model.layers) {
      layer.make = [make = layer.make, seconds] { return std::make_unique<SlowStart>(make(), seconds); };
    }
    at::set_num_threads(threads);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const Cuts found = measured_slices(model, batch, config.pipeline, Device(), /*seconds=*/0).cuts;
    EXPECT_EQ(at::get_num_threads(), threads);
    at::set_num_threads(1);
    return found;
  };
  const Cuts expected = cuts(0, 1);
  EXPECT_GT(expected[1], expected[4] - expected[3]) << "later positions have more keys";
  EXPECT_EQ(cuts(0.03, 1), expected);
  EXPECT_EQ(cuts(0.03, 2), expected);
  {
    const OperatorsEverywhere operators;  // attention counts itself, and not block by block
    const Cuts other = cuts(0, 1);
    for (size_t i = 0; i < other.size(); ++i) EXPECT_NEAR(other[i], expected[i], 3 * kSliceBlock) << i;
  }
}

// The slices are cut by cost. Whatever the cuts are, they cover the sequence in whole blocks.
TEST(Slices, AreCutByCost) {
  Config config = config_of({3, 5}, {});
  config.data.sequence = 64;
  config.pipeline.slices = 3;
  config.pipeline.schedule = "1f1b";
  Trainer trainer(config);
  const Cuts& cuts = trainer.pipeline().cuts();
  ASSERT_EQ(cuts.size(), 4U);
  EXPECT_EQ(cuts.front(), 0);
  EXPECT_EQ(cuts.back(), 64);
  for (size_t i = 1; i + 1 < cuts.size(); ++i) {
    EXPECT_EQ(cuts[i] % kSliceBlock, 0);
    EXPECT_GT(cuts[i], cuts[i - 1]);
  }
  trainer.step();
  // A run that resumes with other cuts is told so.
  Config other = trainer.config();
  EXPECT_EQ(
      check_same_run(facts_of_run(trainer.config(), *trainer.data().train), facts_of_run(other, *trainer.data().train)),
      std::vector<std::string>());
  other.pipeline.slice_lengths = {1, 1, 62};
  const auto notes =
      check_same_run(facts_of_run(trainer.config(), *trainer.data().train), facts_of_run(other, *trainer.data().train));
  ASSERT_EQ(notes.size(), 1U);
  EXPECT_NE(notes[0].find(concat("pipeline.slice_lengths is [1,1,62] but [", cuts[1], ",", cuts[2] - cuts[1], ",",
                                 cuts[3] - cuts[2], "] in the checkpoint")),
            std::string::npos)
      << notes[0];
}

// The bytes of activations and stash that a plan predicts are those of training: to the byte on one rank;
// with messages, but for those that are under way, whose number depends on the clock.
TEST(Slices, PlanPredictsThePeak) {
  constexpr int kMicroBatches = 2;
  for (const auto& lengths : std::vector<std::vector<int>>{{}, {16, 16, 32}}) {
    for (const auto& split : std::vector<std::vector<int>>{{8}, {3, 5}}) {
      Config config = config_of(split, lengths);
      config.data.sequence = 64;
      config.pipeline.schedule = "gpipe";
      config.pipeline.micro_batches = kMicroBatches;
      config.pipeline.memory_cap = "0";
      MeasureOptions measure;
      measure.seconds = 0.01;
      const CostModel costs = measure_costs(config, measure);
      for (const P2Policy policy : {P2Policy::kOff, P2Policy::kEnd}) {
        PlanRequest request;
        request.slices = {config.pipeline.slices};
        PlanChoice choice;
        choice.schedule = "gpipe";
        choice.policy = policy;
        choice.ranks = choice.stages = static_cast<int>(split.size());
        choice.micro_batches = kMicroBatches;
        choice.micro_batch_size = static_cast<int>(config.pipeline.micro_batch_size);
        choice.slices = config.pipeline.slices;
        choice.split = split;
        const Simulation predicted = simulate_choice(costs, choice, request);
        config.pipeline.p2 = policy_name(policy);
        Trainer trainer(config);
        trainer.step();  // makes what is kept over steps
        std::vector<int64_t> fixed;
        for (size_t rank = 0; rank < split.size(); ++rank)
          fixed.push_back(trainer.pipeline().meter().rank_use(static_cast<int>(rank)).total());
        const StepReport report = trainer.step().report;
        const auto message = static_cast<double>(config.pipeline.micro_batch_size * config.data.sequence * 32 * 4);
        for (size_t rank = 0; rank < split.size(); ++rank) {
          const auto measured = static_cast<double>(report.rank_memory[rank].peak - fixed[rank]);
          const double slack = split.size() == 1 ? 0 : kMicroBatches * message;
          EXPECT_NEAR(predicted.ranks[rank].peak_bytes, measured, slack)
              << "rank " << rank << " of " << split.size() << ", p2 " << policy_name(policy) << ", "
              << config.pipeline.slices << " slices";
        }
      }
    }
  }
}

// Long sequences from token files and from packed documents. Nothing is as large as all pairs of positions.
TEST(Slices, LongSequencesOfFiles) {
  constexpr int64_t kLong = 8192;
  const test::TempFolder folder;
  std::string tokens;
  for (int64_t i = 0; i <= kLong; ++i) {
    tokens += static_cast<char>(i * i % 61);
    tokens += '\0';
  }
  const std::string shape = concat("(1, ", kLong, ")");
  for (const char* name : {"input_ids.npy", "labels.npy"})
    folder.write(name, test::npy_file<int32_t>("<i4", shape, std::vector<int32_t>(kLong, 'a')));
  std::vector<int32_t> starts;
  for (int64_t length = 700, left = kLong; left > 0; left -= length, length = std::min(left, length * 3 / 2))
    starts.insert(starts.end(), static_cast<size_t>(length), static_cast<int32_t>(kLong - left));
  folder.write("document_starts.npy", test::npy_file<int32_t>("<i4", shape, starts));
  const auto losses = [&](int slices, bool packed) {
    Config config = config_of({2, 4}, {});
    test::llama_of(config).layers = 2;
    test::llama_of(config).heads = test::llama_of(config).kv_heads = 1;
    test::llama_of(config).vocab = 256;
    config.data = {};
    config.data.sequence = kLong;
    config.data.held_out = 0;
    if (packed) {
      config.data.arrays = folder.path("");
    } else {
      config.data.tokens = folder.write("tokens.bin", tokens);
    }
    config.pipeline.schedule = "1f1b";
    config.pipeline.micro_batches = config.pipeline.micro_batch_size = 1;
    config.pipeline.slices = slices;
    // Not by cost, which would measure twice.
    if (slices > 1) config.pipeline.slice_lengths.assign(slices, static_cast<int>(kLong / slices));
    Trainer trainer(config);
    const StepResult result = trainer.step();
    EXPECT_EQ(result.tokens, kLong);
    for (const MemoryUse& rank : result.report.rank_memory) EXPECT_LT(rank.peak, kLong * kLong) << packed;
    return result.loss;
  };
  EXPECT_NEAR(losses(8, false), std::log(256), 0.5);
  const double whole = losses(1, true);
  EXPECT_NEAR(losses(8, true), whole, 1e-5 * whole);
}

TEST(Slices, MeasuredCosts) {
  Config config = config_of({8}, {});
  config.data.sequence = 64;
  MeasureOptions measure;
  measure.seconds = 0.01;
  measure.slices = {1, 4, 2, 4};
  measure.micro_batch_sizes = {1, 2};
  measure.recompute = {"activations", "both"};
  const CostModel costs = measure_costs(config, measure);
  ASSERT_EQ(costs.slice_lengths.size(), 2U);
  for (const int slices : {2, 4}) {
    EXPECT_TRUE(has_slices(costs, slices));
    EXPECT_TRUE(has_slices(with_recompute(costs, "activations"), slices));
    EXPECT_FALSE(has_slices(with_recompute(costs, "both"), slices));
    // A stage's slices hold as much as the whole, and give it all back: nothing remains after W.
    const auto whole = layer_costs_at(costs, 2);
    const auto parts = slice_costs_at(costs, 2, slices);
    for (size_t layer = 0; layer + 1 < whole.size(); ++layer) {
      double held = 0, left = 0;
      for (const auto& slice : parts) {
        const LayerCost& cost = slice[layer];
        held += cost.forward_held;
        left += cost.forward_held + cost.p1_held - cost.stash;
      }
      EXPECT_GE(held, 0.9 * whole[layer].forward_held) << layer;
      const LayerCost& cost = whole[layer];
      EXPECT_EQ(left, cost.forward_held + cost.p1_held - cost.stash) << layer;
    }
  }
  const auto refused = [&](const std::function<void(Config&)>& change, int slices,
                           const std::vector<std::string>& parts) {
    Config with = config;
    change(with);
    measure.slices = {slices};
    test::expect_error([&] { measure_costs(with, measure); }, parts);
  };
  refused([](Config&) {}, 9, {"slices is 9", "64 positions", "at most 8"});
  refused([](Config&) {}, 0, {"at least 1 slice"});
  refused([](Config& c) { c.model.type = ModelOptions("bert"); }, 2, {"\"bert\"", "slices is 2"});
  measure.recompute = {};
  refused([](Config& c) { c.pipeline.recompute = {"both"}; }, 2, {"recompute has \"both\""});
}

TEST(Slices, RefuseBadInput) {
  const auto refused = [](const std::function<void(Config&)>& change, const std::vector<std::string>& parts) {
    Config config = config_of({3, 5}, {});
    config.pipeline.schedule = "1f1b";
    config.pipeline.slices = 2;
    change(config);
    test::expect_error(
        [&] {
          check_config(config);
          Trainer trainer(config);
        },
        parts);
  };
  refused([](Config& c) { c.pipeline.slices = 3; }, {"pipeline.slices is 3", "16 positions", "use at most 2"});
  refused([](Config& c) { c.pipeline.slice_lengths = {8}; },
          {"pipeline.slice_lengths lists 1 slices", "pipeline.slices is 2"});
  refused([](Config& c) { c.pipeline.slice_lengths = {8, 9}; }, {"add up to 17", "the sequences have 16"});
  refused(
      [](Config& c) {
        c.pipeline.slices = 1;
        c.pipeline.slice_lengths = {15};
      },
      {"add up to 15", "the sequences have 16"});
  refused([](Config& c) { c.data.sequence = 15; }, {"15 positions has 1 block of 8", "set it to 1"});
  refused([](Config& c) { c.pipeline.recompute = {"both"}; }, {"pipeline.slices is 2", "recompute has \"both\""});
  refused([](Config& c) { c.pipeline.schedule = "mine.csv"; }, {"pipeline.slices is 2", "mine.csv", "no slices"});
  refused(
      [](Config& c) {
        c.pipeline.schedule = "auto";
        c.pipeline.memory_cap = "1";
      },
      {"pipeline.memory_cap", "rank", "1 bytes", "the most frugal one needs"});
  refused([](Config& c) { c.model.type = ModelOptions("bert"); }, {"pipeline.slices is 2", "\"bert\""});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
