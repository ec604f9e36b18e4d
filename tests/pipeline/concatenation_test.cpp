// Tests concatenation in the executor: the gradients equal those of the loop up to rounding. The model is an MLP block
// with a layer for each op: norm, gate and up, SwiGLU, down, squared error.
//
// The bound is that of tests/train/concat_test.cpp. A gradient is a sum of n rows in another order. Its rounding errors
// have random signs and reach 2 n u of the largest element (u = 6e-8).
#include "tests/pipeline/support.h"
#include "twobp/nn/layers/activations.h"
#include "twobp/nn/layers/linear.h"
#include "twobp/nn/layers/norms.h"
#include "twobp/nn/layers/squared_error.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::kDim;
using test::kHidden;
using test::options_of;
using test::step_request;
using test::take_gradients;

ModelSpec block_by_layers() {
  ModelSpec model;
  model.input_field = "input";
  const auto add = [&](const std::string& name, std::function<std::unique_ptr<Layer>()> make) {
    model.layers.push_back({name, name, std::move(make)});
  };
  const auto linear = [](const std::string& name, int64_t out, int64_t in) {
    return [=] { return std::make_unique<Linear>(std::vector<ParameterPart>{{name, out}}, in, 0.3, at::kFloat); };
  };
  add("norm", [] { return std::make_unique<RmsNorm>("norm", kDim, 1e-5, at::kFloat); });
  add("gate_up", linear("gate_up", 2 * kHidden, kDim));
  add("swiglu", [] { return std::make_unique<GatedUnit>(Gate::kSilu); });
  add("down", linear("down", kDim, kHidden));
  add("loss", [] { return std::make_unique<SquaredError>(); });
  return model;
}

std::vector<Fields> batch_of(int micro_batches, int64_t last_samples) {
  std::vector<Fields> batch = test::random_batch(micro_batches);
  batch.back() = test::random_fields(99, last_samples);
  return batch;
}

std::vector<at::Tensor> gradients_of(const std::vector<int>& split, const std::vector<Fields>& batch,
                                     const char* schedule, P2Policy policy, P2Batching batching, MemoryCap cap = 0) {
  const ModelSpec model = block_by_layers();
  Pipeline pipeline(model, test::no_costs(model), options_of(split));
  pipeline.run(pipeline.plan(schedule, static_cast<int>(batch.size()), policy, {batching, cap}), batch, step_request());
  return take_gradients(pipeline);
}

void expect_within_bound(const std::vector<at::Tensor>& loop, const std::vector<at::Tensor>& concatenated,
                         int64_t rows) {
  ASSERT_EQ(loop.size(), 3U);
  EXPECT_TRUE(at::equal(loop[0], concatenated[0])) << "the norm's gain has no p2";
  for (const size_t i : {size_t{1}, size_t{2}}) {
    const double largest = loop[i].abs().max().item<double>();
    const double difference = (loop[i] - concatenated[i]).abs().max().item<double>();
    EXPECT_LE(difference, 2 * static_cast<double>(rows) * 6e-8 * largest) << "parameter " << i;
  }
}

TEST(Concatenation, GradientsEqualTheLoopUpToRounding) {
  for (const int64_t last : {test::kBatch, int64_t{1}}) {
    for (const int micro_batches : {1, 2, 3, 7}) {
      const auto batch = batch_of(micro_batches, last);
      const int64_t rows = micro_batches * test::kRows;
      const auto loop = gradients_of({5}, batch, "gpipe", P2Policy::kOff, P2Batching::kLoop);
      for (const auto& split : {std::vector<int>{5}, {2, 3}, {3, 2}}) {
        for (const char* schedule : {"naive", "gpipe", "1f1b"}) {
          for (const P2Policy policy : {P2Policy::kOff, P2Policy::kEnd, P2Policy::kFill}) {
            for (const MemoryCap& cap : {MemoryCap(0), MemoryCap::automatic()}) {
              SCOPED_TRACE(concat(::testing::PrintToString(split), ", ", schedule, " ", policy_name(policy), ", M ",
                                  micro_batches, ", last ", last, ", cap ", cap));
              const auto concatenated = gradients_of(split, batch, schedule, policy, P2Batching::kConcat, cap);
              expect_within_bound(loop, concatenated, rows);
            }
          }
        }
      }
    }
  }
}

// This shows that concatenation happens: one product of four micro-batches rounds differently from four products.
TEST(Concatenation, ChangesTheRounding) {
  const auto batch = batch_of(4, test::kBatch);
  const auto loop = gradients_of({5}, batch, "gpipe", P2Policy::kEnd, P2Batching::kLoop);
  const auto concatenated = gradients_of({5}, batch, "gpipe", P2Policy::kEnd, P2Batching::kConcat);
  EXPECT_FALSE(at::equal(loop[1], concatenated[1]) && at::equal(loop[2], concatenated[2]));
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
