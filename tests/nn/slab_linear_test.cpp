// Backward-p2 of several micro-batches in one call: the GEMMs it takes, the copies its producers spare it,
// and the loop's numbers.
#include <ATen/record_function.h>

#include "tests/nn/layer_test_util.h"
#include "twobp/nn/layers/attention.h"
#include "twobp/nn/layers/linear.h"
#include "twobp/nn/layers/residual.h"
#include "twobp/nn/layers/rms_norm.h"
#include "twobp/nn/layers/sequential.h"
#include "twobp/nn/layers/swiglu.h"
#include "twobp/models/llama.h"

namespace twobp {
namespace {

using namespace test;

constexpr int64_t kIn = 17;
constexpr int64_t kOut = 13;

// Counts the GEMMs of this thread while it exists.
class GemmCount {
 public:
  GemmCount() {
    count = 0;
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& f) -> std::unique_ptr<at::ObserverContext> {
          const std::string name = f.name();
          if (name == "aten::mm" || name == "aten::addmm" || name == "aten::addmm_") ++count;
          return nullptr;
        }).scopes({at::RecordScope::FUNCTION}));
  }
  ~GemmCount() { at::removeCallback(handle_); }
  GemmCount(const GemmCount&) = delete;
  GemmCount& operator=(const GemmCount&) = delete;

  static thread_local int count;

 private:
  at::CallbackHandle handle_;
};

thread_local int GemmCount::count = 0;

struct Sample {
  at::Tensor x;
  at::Tensor dy;
};

Sample sample(int64_t m, int64_t rows) {
  return {random({rows, kIn}, 10 + m, at::kFloat), random({rows, kOut}, 30 + m, at::kFloat)};
}

// |dw| of several samples cannot be off by more than n u |dy|^T |x|, n the length of the sums, in whatever
// order a GEMM adds (Higham, Accuracy and Stability, eq. 3.13): two results differ by at most twice that.
// Elementwise.
void expect_sum(const at::Tensor& dw, const std::vector<Sample>& samples) {
  at::Tensor expected = at::zeros({kOut, kIn}, at::kDouble);
  at::Tensor magnitude = at::zeros({kOut, kIn}, at::kDouble);
  double n = 0;
  for (const auto& [x, dy] : samples) {
    expected += at::mm(dy.to(at::kDouble).t(), x.to(at::kDouble));
    magnitude += at::mm(dy.to(at::kDouble).t().abs(), x.to(at::kDouble).abs());
    n += static_cast<double>(x.size(0));
  }
  const at::Tensor error = (dw.to(at::kDouble) - expected).abs();
  EXPECT_TRUE(error.le(magnitude * (n * unit_roundoff(at::kFloat))).all().item<bool>());
  EXPECT_GT(largest(expected), 0);
}

class LinearWithSlabs : public testing::Test {
 protected:
  LinearWithSlabs() : layer_({{"w", kOut}}, kIn, 0.5, at::kFloat), parameters_(make_parameters(layer_)) {}

  // F and I of micro-batch m, as a container would run it: with what comes before and after writing into the
  // slots.
  void run(int64_t m, int64_t rows, bool in_slots) {
    samples_[m] = sample(m, rows);
    micro_batches_[m] = std::make_unique<MicroBatch>(layer_, Fields{}, m);
    const auto given = [&](const at::Tensor& t, Slab* slab) {
      if (!in_slots || slab == nullptr) return t;
      at::Tensor slot = slab->slot(m, rows, t.size(1), t.options());
      slot.copy_(t);
      return slot;
    };
    micro_batches_[m]->forward(given(samples_[m].x, layer_.input_slab()));
    micro_batches_[m]->p1(given(samples_[m].dy, layer_.gradient_slab()));
  }

  // W of these together; returns how many GEMMs it took.
  int together(const std::vector<int64_t>& which) {
    std::vector<MicroBatch*> list;
    for (const int64_t m : which) list.push_back(micro_batches_[m].get());
    const GemmCount count;
    p2_together(list);
    return GemmCount::count;
  }

  std::vector<Sample> samples(const std::vector<int64_t>& which) {
    std::vector<Sample> list;
    for (const int64_t m : which) list.push_back(samples_[m]);
    return list;
  }

  Linear layer_;
  std::vector<Parameter*> parameters_;
  std::map<int64_t, Sample> samples_;
  std::map<int64_t, std::unique_ptr<MicroBatch>> micro_batches_;
};

TEST_F(LinearWithSlabs, SeveralMicroBatchesAreOneGemmWithoutACopy) {
  layer_.use_slabs(3, false);
  for (int64_t m = 0; m < 3; ++m) run(m, 9, true);
  LiveBytes bytes;
  EXPECT_EQ(together({0, 1, 2}), 1);
  EXPECT_EQ(bytes.peak(), 0) << "something was copied";
  EXPECT_EQ(layer_.input_slab()->copies(), 0);
  EXPECT_EQ(layer_.gradient_slab()->copies(), 0);
  expect_sum(parameters_[0]->grad, samples({0, 1, 2}));
}

TEST_F(LinearWithSlabs, WhatIsNotInItsSlotIsCopiedThereOnce) {
  layer_.use_slabs(3, false);
  for (int64_t m = 0; m < 3; ++m) run(m, 9, false);
  EXPECT_EQ(layer_.input_slab()->copies(), 3);
  EXPECT_EQ(layer_.gradient_slab()->copies(), 3);
  EXPECT_EQ(together({0, 1, 2}), 1);
  expect_sum(parameters_[0]->grad, samples({0, 1, 2}));
}

// The ring wraps while micro-batches pend; the last one is shorter. 2 3 | 4: two runs of slots.
TEST_F(LinearWithSlabs, WrapAroundAndAShorterLastMicroBatch) {
  layer_.use_slabs(4, false);
  for (int64_t m = 0; m < 4; ++m) run(m, 9, true);
  EXPECT_EQ(together({0, 1}), 1);
  run(4, 9, true);
  run(5, 5, true);
  EXPECT_EQ(together({2, 3, 4, 5}), 2);
  expect_sum(parameters_[0]->grad, samples({0, 1, 2, 3, 4, 5}));
  forget_grads(parameters_);
  run(6, 9, true);
  run(7, 9, true);
  run(8, 9, true);  // over the shorter one's neighbours
  EXPECT_EQ(together({6, 7, 8}), 2);
  expect_sum(parameters_[0]->grad, samples({6, 7, 8}));
}

// The first micro-batch is the smallest here: the others have no slot, and are taken one by one.
TEST_F(LinearWithSlabs, LargerMicroBatchesThanTheFirstStayRight) {
  layer_.use_slabs(3, false);
  run(0, 5, false);
  run(1, 9, false);
  run(2, 4, false);
  EXPECT_EQ(together({0, 1, 2}), 3);
  expect_sum(parameters_[0]->grad, samples({0, 1, 2}));
}

// Inputs and gradients whose runs of neighbours do not match: more runs on one side, or as many that break
// elsewhere.
TEST_F(LinearWithSlabs, RunsThatDifferAreTakenOneByOne) {
  layer_.use_slabs(3, false);
  const auto move_elsewhere = [&](int64_t m, bool input, bool gradient) {
    Saved& saved = micro_batches_[m]->saved;
    const at::Tensor x = saved.p2(0);
    const at::Tensor dy = saved.p2(1);
    saved.release_p2();
    saved.keep_until_p2(input ? x.clone() : x);
    saved.keep_until_p2(gradient ? dy.clone() : dy);
  };
  for (int64_t m = 0; m < 3; ++m) run(m, 9, true);
  move_elsewhere(2, false, true);
  EXPECT_EQ(together({0, 1, 2}), 3);
  expect_sum(parameters_[0]->grad, samples({0, 1, 2}));
  forget_grads(parameters_);
  for (int64_t m = 0; m < 3; ++m) run(m, 9, true);
  move_elsewhere(2, true, false);  // inputs 0 1 | 2
  move_elsewhere(0, false, true);  // gradients 0 | 1 2
  EXPECT_EQ(together({0, 1, 2}), 3);
  expect_sum(parameters_[0]->grad, samples({0, 1, 2}));
}

TEST_F(LinearWithSlabs, ConcatenationByCopyIsOneGemmToo) {
  layer_.use_slabs(0, true);
  EXPECT_EQ(layer_.input_slab(), nullptr);
  EXPECT_EQ(layer_.gradient_slab(), nullptr);
  for (int64_t m = 0; m < 3; ++m) run(m, m == 2 ? 4 : 9, false);
  EXPECT_EQ(together({0, 1, 2}), 1);
  expect_sum(parameters_[0]->grad, samples({0, 1, 2}));
}

// y and dx do not depend on slabs, W of one micro-batch neither.
TEST_F(LinearWithSlabs, OneMicroBatchHasTheSameBitsWithAndWithout) {
  run(0, 9, false);
  together({0});
  const at::Tensor expected = parameters_[0]->grad.clone();
  forget_grads(parameters_);
  layer_.use_slabs(2, false);
  run(0, 9, true);
  together({0});
  EXPECT_TRUE(same_bits(parameters_[0]->grad, expected));
}

class WritesOverItsInput : public Layer {
 public:
  Values forward(Values x, Context& context, Saved& saved) override {
    owned = context.owns_input;
    saved.keep_until_p1(x[0]);
    return {x[0].clone()};
  }
  Values backward_p1(Values dy, Context& context, Saved& saved) override {
    const at::Tensor x = saved.take_p1(0);
    at::Tensor dx = context.output(x.sizes(), x.options());
    in_place = dx.data_ptr() == x.data_ptr();
    dx.copy_(dy[0]);
    return {std::move(dx)};
  }
  bool gradient_replaces_input() const override { return true; }

  bool owned = false;
  bool in_place = false;
};

// The output of a Linear lies where its gradient will be, if the next layer says so. It owns it, but not what
// a residual around it adds in the end.
TEST(OutputSlab, IsTheGradientsWhereThatReplacesTheInput) {
  auto linear = std::make_unique<Linear>(std::vector<ParameterPart>{{"w", kIn}}, kIn, 0.5, at::kFloat);
  auto inner = std::make_unique<WritesOverItsInput>();
  auto within = std::make_unique<WritesOverItsInput>();
  WritesOverItsInput* const behind_linear = inner.get();
  WritesOverItsInput* const in_residual = within.get();
  auto last = std::make_unique<Linear>(std::vector<ParameterPart>{{"v", kIn}}, kIn, 0.5, at::kFloat);
  auto model = make_sequential(std::move(linear), std::move(inner), std::move(last),
                               std::make_unique<Residual>(make_sequential(std::move(within))));
  const auto parameters = make_parameters(*model);
  const auto run_one = [&] {
    MicroBatch micro_batch(*model, Fields{}, 0);
    micro_batch.forward(sample(0, 9).x);
    micro_batch.p1(sample(1, 9).x);
  };
  run_one();
  EXPECT_FALSE(behind_linear->owned || behind_linear->in_place) << "there are no slabs";
  model->use_slabs(2, false);
  run_one();
  EXPECT_TRUE(behind_linear->owned && behind_linear->in_place);
  EXPECT_FALSE(in_residual->owned) << "the residual reads it again";
  EXPECT_TRUE(in_residual->in_place) << "but not in the backward";
}

// RmsNorm -> Linear -> SwiGlu -> Linear -> RmsNorm: everything p2 concatenates is written where it is read.
class Chain {
 public:
  Chain() {
    auto first =
        std::make_unique<Linear>(std::vector<ParameterPart>{{"gate", 14}, {"up", 14}}, 10, 0.5, at::kFloat);
    auto second = std::make_unique<Linear>(std::vector<ParameterPart>{{"down", 10}}, 14, 0.5, at::kFloat);
    linear = {first.get(), second.get()};
    model = make_sequential(std::make_unique<RmsNorm>("g0", 10, 1e-5, at::kFloat), std::move(first),
                            std::make_unique<SwiGlu>(), std::move(second),
                            std::make_unique<RmsNorm>("g1", 10, 1e-5, at::kFloat));
    parameters = make_parameters(*model);
  }

  int64_t copies() const {
    int64_t sum = 0;
    for (Linear* one : linear) sum += one->input_slab()->copies() + one->gradient_slab()->copies();
    return sum;
  }

  // Gradients of four micro-batches, the last one shorter.
  std::vector<at::Tensor> gradients(bool concatenate, bool evaluate_between) {
    forget_grads(parameters);
    std::vector<std::unique_ptr<MicroBatch>> micro_batches;
    std::vector<MicroBatch*> list;
    for (int64_t m = 0; m < 4; ++m) {
      const int64_t samples = m == 3 ? 1 : 2;
      micro_batches.push_back(std::make_unique<MicroBatch>(*model, Fields{}, m));
      list.push_back(micro_batches.back().get());
      const at::Tensor y = list.back()->forward(random({samples, 3, 10}, m, at::kFloat));
      if (evaluate_between) list.back()->evaluate(random({samples, 3, 10}, 50, at::kFloat));
      list.back()->p1(random(y.sizes(), 20 + m, at::kFloat));
      if (evaluate_between) list.front()->evaluate(random({samples, 3, 10}, 60, at::kFloat));
    }
    const GemmCount count;
    if (concatenate) {
      p2_together(list);
    } else {
      for (MicroBatch* micro_batch : list) micro_batch->p2();
    }
    p2_gemms = GemmCount::count;
    return copy_grads(parameters);
  }

  int p2_gemms = 0;
  std::unique_ptr<Sequential> model;
  std::vector<Linear*> linear;
  std::vector<Parameter*> parameters;
};

// Sums of 21 rows, added in another order: each side is off by at most 21 roundings (see expect_close).
constexpr double kRoundings = 2 * 21;

TEST(SlabChain, ProducersWriteIntoSlots) {
  Chain chain;
  const auto expected = chain.gradients(false, false);
  EXPECT_EQ(chain.p2_gemms, 2 * 4);
  chain.model->use_slabs(4, false);
  const auto actual = chain.gradients(true, false);
  EXPECT_EQ(chain.p2_gemms, 2);
  EXPECT_EQ(chain.copies(), 0);
  for (size_t i = 0; i < expected.size(); ++i) {
    expect_close(actual[i], expected[i], kRoundings, at::kFloat, chain.parameters[i]->name());
  }
  chain.model->use_slabs(0, false);
  const auto without = chain.gradients(false, false);
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(same_bits(without[i], expected[i]));
}

// An evaluation has the numbers of micro-batches that train; their slots are not its own.
TEST(SlabChain, EvaluationLeavesSlotsAlone) {
  Chain chain;
  chain.model->use_slabs(4, false);
  const auto expected = chain.gradients(true, false);
  const auto actual = chain.gradients(true, true);
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(same_bits(actual[i], expected[i])) << chain.parameters[i]->name();
  }
}

// One GEMM for each Linear, also when the first thing the model sees is an evaluation of a smaller batch.
TEST(SlabChain, EvaluationDoesNotSayHowLargeASlotIs) {
  Chain chain;
  chain.model->use_slabs(4, false);
  MicroBatch(*chain.model).evaluate(random({1, 1, 10}, 1, at::kFloat));
  chain.gradients(true, false);
  EXPECT_EQ(chain.copies(), 0);
  EXPECT_EQ(chain.p2_gemms, 2);
}

// Attention writes both its output and its input's gradient where they are wanted.
TEST(SlabChain, AttentionCopiesNothing) {
  const AttentionShape shape{2, 1, 4, 10000};
  auto first =
      std::make_unique<Linear>(std::vector<ParameterPart>{{"qkv", shape.packed()}}, 10, 0.5, at::kFloat);
  auto second = std::make_unique<Linear>(std::vector<ParameterPart>{{"o", 10}}, 8, 0.5, at::kFloat);
  Linear& qkv = *first;
  Linear& o = *second;
  auto model = make_sequential(std::make_unique<RmsNorm>("g0", 10, 1e-5, at::kFloat), std::move(first),
                               std::make_unique<Attention>(shape, at::kFloat), std::move(second),
                               std::make_unique<RmsNorm>("g1", 10, 1e-5, at::kFloat));
  make_parameters(*model);
  model->use_slabs(3, false);
  for (int64_t m = 0; m < 3; ++m) {
    MicroBatch micro_batch(*model, {}, m);
    micro_batch.forward(random({2, 3, 10}, m, at::kFloat));
    micro_batch.p1(random({2, 3, 10}, 20 + m, at::kFloat));
  }
  EXPECT_EQ(qkv.input_slab()->copies() + qkv.gradient_slab()->copies() + o.input_slab()->copies() +
                o.gradient_slab()->copies(),
            0);
}

}  // namespace
}  // namespace twobp
