// Several micro-batches pass through a layer at once. In any order of F, I and W, each keeps its own saved tensors,
// gradients accumulate, and an evaluation in between changes nothing.
#include <array>
#include <sstream>

#include "tests/nn/layer_cases.h"

namespace twobp::TWOBP_FILE {
namespace {

using namespace test;

// Micro-batches 0 and 1 have 2 samples. Micro-batch 2 is the last one and shorter.
constexpr std::array<int64_t, 3> kSamples = {2, 2, 1};

struct Result {
  std::array<at::Tensor, 3> y;
  std::array<at::Tensor, 3> dx;
  std::vector<at::Tensor> dw;
};

class Orders {
 public:
  explicit Orders(const LayerCase& c, at::ScalarType dtype = at::kFloat)
      : case_(c), dtype_(dtype), layer_(c.make(dtype)), parameters_(make_parameters(*layer_)) {
    for (int m = 0; m < 3; ++m) micro_batches_[m] = new_micro_batch(m);
  }

  // `order` consists of letters with the number of the micro-batch, such as "F0 I0 W0". E evaluates other numbers on
  // the layer, with the Saved of that micro-batch. T2 runs W of all micro-batches up to 2 together.
  Result run(const std::string& order) {
    forget_grads(parameters_);
    Result result;
    std::istringstream in(order);
    for (std::string what; in >> what;) step(what[0], what[1] - '0', result);
    result.dw = copy_grads(parameters_);
    return result;
  }

  const std::vector<Parameter*>& parameters() const { return parameters_; }

 private:
  std::unique_ptr<MicroBatch> new_micro_batch(int m) {
    return case_.micro_batch(*layer_, kSamples[m], 10 + m, dtype_, m);
  }

  void step(char op, int m, Result& result) {
    MicroBatch& micro_batch = *micro_batches_[m];
    if (op == 'F') {
      result.y[m] = micro_batch.forward(case_.make_input(kSamples[m], 20 + m, dtype_)).clone();
    } else if (op == 'I') {
      const at::Tensor dx = micro_batch.p1(case_.make_gradient(result.y[m], 30 + m));
      result.dx[m] = dx.defined() ? dx.clone() : dx;
      micro_batch.saved.release_p1();
    } else if (op == 'W') {
      micro_batch.p2();
    } else if (op == 'T') {
      std::vector<MicroBatch*> all;
      for (int i = 0; i <= m; ++i) all.push_back(micro_batches_[i].get());
      p2_together(all);
    } else {
      const at::Tensor x = case_.make_input(kSamples[m], 50, dtype_);
      const at::Tensor first = micro_batch.evaluate(x);
      EXPECT_TRUE(same_bits(micro_batch.evaluate(x.defined() ? x.clone() : x), first));
    }
  }

  const LayerCase& case_;
  at::ScalarType dtype_;
  std::unique_ptr<Layer> layer_;
  std::vector<Parameter*> parameters_;
  std::array<std::unique_ptr<MicroBatch>, 3> micro_batches_;
};

void expect_same_bits(const Result& actual, const Result& expected, const std::string& order) {
  for (int m = 0; m < 3; ++m) {
    EXPECT_TRUE(same_bits(actual.y[m], expected.y[m])) << order << ": y of " << m;
    EXPECT_TRUE(same_bits(actual.dx[m], expected.dx[m])) << order << ": dx of " << m;
  }
  for (size_t i = 0; i < expected.dw.size(); ++i) {
    EXPECT_TRUE(same_bits(actual.dw[i], expected.dw[i])) << order << ": dw " << i;
  }
}

// The expected result is the sum over micro-batches that ran alone. If W (and I, for a norm's gain) runs in micro-batch
// order, it is exact bit for bit. In other orders, it differs by rounding.
TEST_P(EveryLayer, OrderOfMicroBatchesDoesNotMatter) {
  Orders orders(GetParam());
  const Result expected = orders.run("F0 I0 W0 F1 I1 W1 F2 I2 W2");
  for (const char* order : {
           "F0 F1 F2 I0 I1 I2 W0 W1 W2",  // W delayed to the end
           "F0 F1 F2 I0 W0 I1 W1 I2 W2",  // GPipe with fused backward
           "F0 F1 I0 W0 F2 I1 W1 I2 W2",  // 1F1B
           "F0 I0 F1 I1 W0 F2 W1 I2 W2",  // W1 after F2 and before I2
           "F0 F1 I0 I1 F2 W0 I2 W1 W2",
       }) {
    expect_same_bits(orders.run(order), expected, order);
  }
}

TEST_P(EveryLayer, OtherOrdersOfBackwardGiveTheSameSums) {
  const LayerCase& c = GetParam();
  Orders orders(c);
  const Result expected = orders.run("F0 I0 W0 F1 I1 W1 F2 I2 W2");
  for (const std::string order : {"F2 F0 F1 I1 W1 I2 I0 W0 W2", "F0 F1 F2 I0 I1 I2 T2"}) {
    const Result actual = orders.run(order);
    for (int m = 0; m < 3; ++m) {
      EXPECT_TRUE(same_bits(actual.y[m], expected.y[m])) << order << ": y of " << m;
      EXPECT_TRUE(same_bits(actual.dx[m], expected.dx[m])) << order << ": dx of " << m;
    }
    for (size_t i = 0; i < expected.dw.size(); ++i)
      expect_close(actual.dw[i], expected.dw[i], 6 * c.roundings, at::kFloat, order + ": dw " + std::to_string(i));
  }
}

// Gradients accumulate: the result is the sum over the micro-batches alone. Three micro-batches make sums three times
// as long on both sides.
TEST_P(EveryLayer, GradientsOfMicroBatchesAddUp) {
  const LayerCase& c = GetParam();
  Orders orders(c);
  const Result together = orders.run("F0 F1 F2 I0 I1 I2 W0 W1 W2");
  const std::array<Result, 3> alone = {orders.run("F0 I0 W0"), orders.run("F1 I1 W1"), orders.run("F2 I2 W2")};
  for (size_t i = 0; i < together.dw.size(); ++i) {
    const at::Tensor sum = alone[0].dw[i].to(at::kDouble) + alone[1].dw[i] + alone[2].dw[i];
    expect_close(together.dw[i], sum, 6 * c.roundings, at::kFloat, "dw " + std::to_string(i));
    for (const Result& one : alone) EXPECT_FALSE(same_bits(one.dw[i], together.dw[i]));
  }
}

// The first contribution after forget_grad overwrites the gradient of the previous step. Later contributions are added.
TEST_P(EveryLayer, GradientsOfThePreviousStepAreForgotten) {
  Orders orders(GetParam());
  const Result first = orders.run("F0 I0 W0");
  orders.run("F1 I1 W1 F2 I2 W2");
  for (Parameter* parameter : orders.parameters()) parameter->grad.fill_(std::numeric_limits<float>::quiet_NaN());
  expect_same_bits(orders.run("F0 I0 W0"), first, "again");
}

TEST_P(EveryLayer, EvaluationBetweenChangesNothing) {
  Orders orders(GetParam());
  const Result expected = orders.run("F0 F1 I0 I1 W0 W1");
  for (const char* order : {"F0 E0 F1 E1 I0 E0 I1 E1 W0 E0 W1 E1", "E0 E1 F0 F1 E2 E0 I0 I1 E2 E1 W0 W1"}) {
    expect_same_bits(orders.run(order), expected, order);
  }
}

// The result of a micro-batch does not depend on the mode.
TEST_P(EveryLayer, EvaluationComputesTheSameAsTraining) {
  const LayerCase& c = GetParam();
  if (c.batch_statistics) GTEST_SKIP() << "batch_norm_test has these";
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    auto layer = c.make(dtype);
    make_parameters(*layer);
    const auto micro_batch = c.micro_batch(*layer, 2, 1, dtype);
    const at::Tensor x = c.make_input(2, 1, dtype);
    const at::Tensor evaluated = micro_batch->evaluate(x);
    // Cross-entropy sums exponentials in two loops, which are vectorised differently.
    expect_close(micro_batch->forward(x), evaluated, c.is_loss() ? c.roundings : 0, dtype, "y");
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
