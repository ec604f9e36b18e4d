// Tests the layers of a captured module, against finite differences and one by one.
#include "twobp/graph/program_layer.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <gtest/gtest.h>

#include "tests/expect_error.h"
#include "tests/graph/mlp_graph.h"
#include "twobp/models/recompute/recompute_layer.h"
#include "twobp/nn/check_layer.h"

namespace twobp::TWOBP_FILE {
namespace {

using graph::ProgramLayer;
using test::MlpGraph;

MlpGraph in_float64() {
  MlpGraph mlp;
  mlp.dtype = "float64";
  return mlp;
}

at::Tensor random(at::IntArrayRef sizes, uint64_t seed) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed), at::TensorOptions().dtype(at::kDouble));
}

Fields fields() {
  return {{"input", random({test::kSamples, test::kIn}, 1)}, {"target", random({test::kSamples, test::kOut}, 2)}};
}

class ProgramLayerTest : public ::testing::Test {
 protected:
  const at::AutoDispatchBelowADInplaceOrView below_autograd_;
  std::shared_ptr<graph::Graph> graph_ = in_float64().graph();
};

TEST_F(ProgramLayerTest, HasTheGradientsOfFiniteDifferences) {
  for (int i = 0; i < 4; ++i) {
    SCOPED_TRACE(i);
    ProgramLayer layer(graph_, i);
    LayerCheck check;
    check.fields = fields();
    check.loss_weight = 0.25;
    Values x;
    if (i > 0) x.push_back(random({test::kSamples, test::kHidden}, 3));
    check_layer(layer, x, check);
  }
}

struct Outcomes {
  at::Tensor y;
  at::Tensor dx;
  std::vector<at::Tensor> gradients;
};

// Runs F, I and W of one micro-batch.
Outcomes run(Layer& layer, const at::Tensor& x, Context context) {
  const Fields batch = fields();
  context.fields = &batch;
  std::vector<Parameter*> parameters;
  layer.collect_parameters(parameters);
  for (Parameter* parameter : parameters) {
    if (!parameter->value.defined()) {
      parameter->allocate_value(1);
      if (!parameter->is_buffer()) parameter->value.copy_(random(parameter->sizes(), 5));
    }
    parameter->allocate_grad();
  }
  Saved saved;
  Outcomes result;
  result.y = layer.forward({x.clone()}, context, saved)[0];
  if (!context.training) return result;
  result.dx = layer.backward_p1({at::ones_like(result.y)}, context, saved)[0];
  saved.release_p1();
  std::vector<P2Unit> units;
  layer.collect_p2(saved, units);
  for (const P2Unit& unit : units) {
    unit.layer->backward_p2({&unit.saved, 1});
    unit.saved->release_p2();
  }
  for (Parameter* parameter : parameters) {
    if (parameter->trainable()) result.gradients.push_back(parameter->grad.clone());
  }
  return result;
}

TEST_F(ProgramLayerTest, DrawsDifferByMicroBatchStepAndLayer) {
  const at::Tensor x = random({test::kSamples, test::kHidden}, 3);
  const auto y = [&](int layer, uint64_t seed, int64_t step, int64_t micro_batch) {
    ProgramLayer one(graph_, layer);
    Context context;
    context.seed = seed;
    context.step = step;
    context.micro_batch = micro_batch;
    return run(one, x, context).y;
  };
  const at::Tensor first = y(1, 7, 1, 0);
  EXPECT_TRUE(at::equal(first, y(1, 7, 1, 0)));
  EXPECT_FALSE(at::equal(first.ne(0), y(2, 7, 1, 0).ne(0)));
  EXPECT_FALSE(at::equal(first.ne(0), y(1, 8, 1, 0).ne(0)));
  EXPECT_FALSE(at::equal(first.ne(0), y(1, 7, 2, 0).ne(0)));
  EXPECT_FALSE(at::equal(first.ne(0), y(1, 7, 1, 1).ne(0)));
}

TEST_F(ProgramLayerTest, RecomputesTheSameBits) {
  const at::Tensor x = random({test::kSamples, test::kHidden}, 3);
  ProgramLayer plain(graph_, 1);
  const Outcomes expected = run(plain, x, {});
  for (const auto mode : {Recompute::kActivations, Recompute::kDerivatives, Recompute::kBoth}) {
    RecomputeLayer again(std::make_unique<ProgramLayer>(graph_, 1), mode);
    const Outcomes actual = run(again, x, {});
    EXPECT_TRUE(at::equal(actual.y, expected.y));
    EXPECT_TRUE(at::equal(actual.dx, expected.dx));
    for (size_t i = 0; i < expected.gradients.size(); ++i)
      EXPECT_TRUE(at::equal(actual.gradients[i], expected.gradients[i])) << i;
    std::vector<Parameter*> ours, theirs;
    plain.collect_parameters(ours);
    again.collect_parameters(theirs);
    EXPECT_TRUE(at::equal(ours[2]->value, theirs[2]->value)) << "the buffer";
  }
}

TEST_F(ProgramLayerTest, ChangesBuffersOnlyInTraining) {
  const at::Tensor x = random({test::kSamples, test::kHidden}, 3);
  ProgramLayer layer(graph_, 1);
  std::vector<Parameter*> parameters;
  layer.collect_parameters(parameters);
  ASSERT_TRUE(parameters[2]->is_buffer());
  Context evaluation;
  evaluation.training = false;
  const at::Tensor y = run(layer, x, evaluation).y;
  EXPECT_EQ(parameters[2]->value.abs().sum().item<double>(), 0);
  const at::Tensor linear = at::addmm(parameters[1]->value, x, parameters[0]->value.t());
  EXPECT_TRUE(at::allclose(y, linear.relu() * in_float64().constants().at("scale")));  // no dropout
  const Outcomes trained = run(layer, x, {});
  EXPECT_TRUE(at::allclose(parameters[2]->value, 0.1 * trained.y.mean(0)));
}

// A layer keeps for W only the tensors that W needs. If its weights are frozen, it keeps nothing for W.
TEST_F(ProgramLayerTest, KeepsOnlyNeededTensors) {
  const Fields batch = fields();
  Context context;
  context.fields = &batch;
  for (const bool frozen : {false, true}) {
    ProgramLayer layer(graph_, 1);
    std::vector<Parameter*> parameters;
    layer.collect_parameters(parameters);
    for (Parameter* parameter : parameters) {
      if (frozen && !parameter->is_buffer()) parameter->freeze();
      parameter->allocate_value(1);
      parameter->allocate_grad();
    }
    Saved saved;
    const Values y = layer.forward({random({test::kSamples, test::kHidden}, 3)}, context, saved);
    EXPECT_EQ(saved.p1_count(), 2u);  // the output of relu, and the mask
    layer.backward_p1({at::ones_like(y[0])}, context, saved);
    std::vector<P2Unit> units;
    layer.collect_p2(saved, units);
    ASSERT_EQ(units.size(), frozen ? 0u : 1u);
    if (frozen) continue;
    EXPECT_EQ(units[0].saved->p2_count(), 2u);  // the input of the layer, and the gradient of its output
  }
}

TEST_F(ProgramLayerTest, NamesTheKnownShapes) {
  ProgramLayer layer(graph_, 0);
  Fields other = fields();
  other["input"] = random({3, test::kIn}, 1);
  Context context;
  context.fields = &other;
  Saved saved;
  test::expect_error([&] { layer.forward({}, context, saved); }, {"no program for a micro-batch of input Double [3, 3]",
                                                                  "It has programs for: input Double [4, 3]"});
  graph::add_shape(*graph_, in_float64().shape(3), "shape", {});
  other["target"] = random({3, test::kOut}, 1);
  std::vector<Parameter*> parameters;
  layer.collect_parameters(parameters);
  for (Parameter* parameter : parameters) parameter->allocate_value(1);
  EXPECT_EQ(layer.forward({}, context, saved)[0].size(0), 3);
}

TEST_F(ProgramLayerTest, CountsTargets) {
  EXPECT_EQ(graph_->count_targets(fields()), test::kSamples);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
