// Concatenation through slabs as the executor drives it: what is copied and what is written where it will be
// read, and gradients within rounding of the loop's. The model is an MLP block with each layer on its own, so
// that the test can reach the slabs: norm, gate and up, SwiGLU, down, squared error.
//
// The bound is that of tests/train/concat_test.cpp: a gradient is a sum of n rows, summed in another order,
// with rounding errors of random signs of 2 n u of the largest element (u = 6e-8).
#include "tests/pipeline/support.h"
#include "twobp/nn/layers/linear.h"
#include "twobp/nn/layers/rms_norm.h"
#include "twobp/nn/layers/squared_error.h"
#include "twobp/nn/layers/swiglu.h"

namespace twobp {
namespace {

using test::kDim;
using test::kHidden;
using test::options_of;
using test::step_input;
using test::take_gradients;

constexpr int kGateUp = 1;  // layers of the model below
constexpr int kDown = 3;

ModelSpec block_by_layers() {
  ModelSpec model;
  model.input_field = "input";
  const auto add = [&](const std::string& name, std::function<std::unique_ptr<Layer>()> make) {
    model.layers.push_back({name, name, std::move(make)});
  };
  const auto linear = [](const std::string& name, int64_t out, int64_t in) {
    return [=] {
      return std::make_unique<Linear>(std::vector<ParameterPart>{{name, out}}, in, 0.3, at::kFloat);
    };
  };
  add("norm", [] { return std::make_unique<RmsNorm>("norm", kDim, 1e-5, at::kFloat); });
  add("gate_up", linear("gate_up", 2 * kHidden, kDim));
  add("swiglu", [] { return std::make_unique<SwiGlu>(); });
  add("down", linear("down", kDim, kHidden));
  add("loss", [] { return std::make_unique<SquaredError>(); });
  return model;
}

struct Copies {
  int64_t gate_up_input, gate_up_gradient, down_input, down_gradient;
  bool operator==(const Copies&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Copies& c) {
  return out << c.gate_up_input << " " << c.gate_up_gradient << " " << c.down_input << " " << c.down_gradient;
}

Copies copies_of(Pipeline& pipeline) {
  Layer* layers[2] = {};
  for (int s = 0; s < pipeline.stages(); ++s) {
    Stage& stage = pipeline.stage(s);
    for (int i = 0; i < stage.layer_count(); ++i) {
      if (stage.first_layer() + i == kGateUp) layers[0] = &stage.layer(i);
      if (stage.first_layer() + i == kDown) layers[1] = &stage.layer(i);
    }
  }
  const auto copies = [](Slab* slab) { return slab == nullptr ? -1 : slab->copies(); };
  return {copies(layers[0]->input_slab()), copies(layers[0]->gradient_slab()),
          copies(layers[1]->input_slab()), copies(layers[1]->gradient_slab())};
}

std::vector<Fields> batch_of(int micro_batches, int64_t last_samples) {
  std::vector<Fields> batch = test::random_batch(micro_batches);
  batch.back() = test::random_fields(99, last_samples);
  return batch;
}

struct Outcome {
  std::vector<at::Tensor> gradients;
  Copies copies;
};

Outcome run(const std::vector<int>& split, const std::vector<Fields>& batch, const char* schedule,
            P2Policy policy, P2Batching batching, MemoryCap cap = 0) {
  const ModelSpec model = block_by_layers();
  Pipeline pipeline(model, test::no_costs(model), options_of(split));
  pipeline.run(pipeline.setup(schedule, static_cast<int>(batch.size()), policy, batching, cap), batch,
               step_input());
  return {take_gradients(pipeline), copies_of(pipeline)};
}

// Slabs are only there for `concat`. In one stage every producer has a form that writes into the slot, except
// the loss, whose gradient was kept since forward: one copy a micro-batch.
TEST(Slabs, CopyOnlyWhereThereIsNoOutForm) {
  const auto batch = batch_of(4, test::kBatch);
  EXPECT_EQ(run({5}, batch, "gpipe", P2Policy::kEnd, P2Batching::kConcat).copies, (Copies{0, 0, 0, 4}));
  EXPECT_EQ(run({5}, batch, "1f1b", P2Policy::kFill, P2Batching::kConcat).copies, (Copies{0, 0, 0, 4}));
  EXPECT_EQ(run({5}, batch, "gpipe", P2Policy::kEnd, P2Batching::kLoop).copies, (Copies{-1, -1, -1, -1}));
  EXPECT_EQ(run({5}, batch, "gpipe", P2Policy::kEnd, P2Batching::kConcatCopy).copies,
            (Copies{-1, -1, -1, -1}));
}

// What comes in a message is not where it is wanted: a copy for each, and no more than that.
TEST(Slabs, CopyMessages) {
  const auto batch = batch_of(4, test::kBatch);
  EXPECT_EQ(run({1, 4}, batch, "gpipe", P2Policy::kEnd, P2Batching::kConcat).copies, (Copies{4, 0, 0, 4}));
  EXPECT_EQ(run({2, 3}, batch, "gpipe", P2Policy::kEnd, P2Batching::kConcat).copies, (Copies{0, 4, 0, 4}));
  EXPECT_EQ(run({3, 2}, batch, "gpipe", P2Policy::kEnd, P2Batching::kConcat).copies, (Copies{0, 0, 4, 4}));
}

void expect_within_bound(const Outcome& loop, const Outcome& concatenated, int64_t rows) {
  ASSERT_EQ(loop.gradients.size(), 3U);
  EXPECT_TRUE(at::equal(loop.gradients[0], concatenated.gradients[0])) << "the norm's gain has no p2";
  for (const size_t i : {size_t{1}, size_t{2}}) {
    const double largest = loop.gradients[i].abs().max().item<double>();
    const double difference = (loop.gradients[i] - concatenated.gradients[i]).abs().max().item<double>();
    EXPECT_LE(difference, 2 * static_cast<double>(rows) * 6e-8 * largest) << "parameter " << i;
  }
}

TEST(Slabs, GradientsWithinRoundingOfTheLoop) {
  for (const P2Batching batching : {P2Batching::kConcat, P2Batching::kConcatCopy}) {
    for (const int64_t last : {test::kBatch, int64_t{1}}) {
      for (const int micro_batches : {1, 2, 3, 7}) {
        const auto batch = batch_of(micro_batches, last);
        const int64_t rows = micro_batches * test::kRows;
        const Outcome loop = run({5}, batch, "gpipe", P2Policy::kOff, P2Batching::kLoop);
        for (const auto& split : {std::vector<int>{5}, {2, 3}, {3, 2}}) {
          for (const char* schedule : {"naive", "gpipe", "1f1b"}) {
            for (const P2Policy policy : {P2Policy::kOff, P2Policy::kEnd, P2Policy::kFill}) {
              // With the automatic cap, of costs that are zero here, rings hold as many micro-batches as
              // standard backpropagation; without a cap, all.
              for (const MemoryCap& cap : {MemoryCap(0), MemoryCap::automatic()}) {
                SCOPED_TRACE(concat(batching_name(batching), ", ", ::testing::PrintToString(split), ", ",
                                    schedule, " ", policy_name(policy), ", M ", micro_batches, ", last ",
                                    last, ", cap ", cap));
                expect_within_bound(loop, run(split, batch, schedule, policy, batching, cap), rows);
              }
            }
          }
        }
      }
    }
  }
}

// Concatenation does happen: four micro-batches in one product round differently from four products.
TEST(Slabs, DoConcatenate) {
  const auto batch = batch_of(4, test::kBatch);
  const Outcome loop = run({5}, batch, "gpipe", P2Policy::kEnd, P2Batching::kLoop);
  for (const P2Batching batching : {P2Batching::kConcat, P2Batching::kConcatCopy}) {
    const Outcome concatenated = run({5}, batch, "gpipe", P2Policy::kEnd, batching);
    EXPECT_FALSE(at::equal(loop.gradients[1], concatenated.gradients[1]) &&
                 at::equal(loop.gradients[2], concatenated.gradients[2]))
        << batching_name(batching);
  }
}

// The same rows one below the other, whether a view of the ring or a copy: the same product, the same bits.
TEST(Slabs, RingAndCopyGiveTheSameBits) {
  for (const int64_t last : {test::kBatch, int64_t{1}}) {
    const auto batch = batch_of(4, last);
    const Outcome ring = run({5}, batch, "gpipe", P2Policy::kEnd, P2Batching::kConcat);
    const Outcome copy = run({5}, batch, "gpipe", P2Policy::kEnd, P2Batching::kConcatCopy);
    test::expect_same_bits(ring.gradients, copy.gradients);
  }
}

// A ring of two for seven micro-batches: 1F1B over two stages, where W of the oldest has to make way.
TEST(Slabs, RingSmallerThanTheNumberOfMicroBatches) {
  const ModelSpec model = block_by_layers();
  Pipeline pipeline(model, test::no_costs(model), options_of({2, 3}));
  const StepSetup setup = pipeline.setup("1f1b", 7, P2Policy::kEnd, P2Batching::kConcat, int64_t{1} << 40);
  ASSERT_EQ(setup.slab_slots, 2);
  const auto batch = batch_of(7, test::kBatch);
  pipeline.run(setup, batch, step_input());
  const Outcome ring{take_gradients(pipeline), copies_of(pipeline)};
  EXPECT_EQ(ring.copies, (Copies{0, 7, 0, 7}));
  expect_within_bound(run({5}, batch, "gpipe", P2Policy::kOff, P2Batching::kLoop), ring, 7 * test::kRows);
}

}  // namespace
}  // namespace twobp
