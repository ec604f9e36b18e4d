// Tests Saved: the tensors that it returns, when it releases them, and the Error for a backward pass without a forward
// pass.
#include "tests/nn/layer_cases.h"
#include "twobp/nn/layer.h"
#include "twobp/nn/layers/activations.h"
#include "twobp/nn/layers/linear.h"
#include "twobp/nn/layers/norms.h"

namespace twobp::TWOBP_FILE {
namespace {

using namespace test;

// Reports when the last tensor on a memory block is gone.
class Watch {
 public:
  explicit Watch(const at::Tensor& t) : storage_(t.storage().getWeakStorageImpl()) {}
  bool gone() const { return storage_.expired(); }

 private:
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
};

TEST(Saved, TakeHandsATensorOutForGood) {
  Saved saved;
  saved.keep_until_p1(at::ones({2}));
  saved.keep_until_p1(at::zeros({3}));
  at::Tensor second = saved.take_p1(1);
  EXPECT_EQ(second.size(0), 3);
  EXPECT_TRUE(exclusively_owned(second));
  at::Tensor first = saved.take_p1(0);
  EXPECT_EQ(first.size(0), 2);
  expect_error([&] { saved.take_p1(0); }, {"saved tensor 0", "forward"});
  expect_error([&] { saved.take_p1(2); }, {"saved tensor 2", "forward"});
}

TEST(Saved, KeepsUntilP2AcrossP1) {
  Saved saved;
  at::Tensor tensor = at::ones({2});
  const Watch watch(tensor);
  saved.keep_until_p2(std::move(tensor));
  saved.keep_until_p1(at::ones({2}));
  saved.release_p1();
  EXPECT_EQ(saved.p2_count(), 1u);
  EXPECT_EQ(saved.p2(0).size(0), 2);
  EXPECT_FALSE(watch.gone());
  expect_error([&] { saved.p2(1); }, {"saved tensor 1 of 1"});
  saved.release_p2();
  EXPECT_TRUE(watch.gone());
  expect_error([&] { saved.p2(0); }, {"saved tensor 0 of 0"});
}

// Only float32 tensors that take more memory than their copy are rounded. One that is kept twice stays one.
TEST(Saved, RoundsWhatOnlyWReads) {
  Saved saved;
  const at::Tensor input = at::tensor({1.0F + 1.0F / 1024, 3.0F});
  const at::Tensor ids = at::tensor({1, 2}, at::kLong);
  const at::Tensor expanded = at::ones({1}).expand({8});
  saved.keep_until_p2(input);
  saved.keep_until_p2(ids);
  saved.keep_until_p2(expanded);
  saved.child(0).keep_until_p2(input.view({2}));
  saved.child(1).keep_until_p2(input.narrow(0, 1, 1));
  saved.round_p2();
  saved.round_p2();  // nothing is left to round
  EXPECT_EQ(saved.p2(0).scalar_type(), at::kBFloat16);
  EXPECT_TRUE(saved.p2(1).is_same(ids));
  EXPECT_TRUE(saved.p2(2).is_same(expanded));
  EXPECT_TRUE(saved.child(0).p2(0).is_same(saved.p2(0)));
  EXPECT_FALSE(saved.child(1).p2(0).is_alias_of(saved.p2(0))) << "another part of the same memory";
  saved.widen_p2();
  EXPECT_TRUE(at::equal(saved.p2(0), at::tensor({1.0F, 3.0F})));
  EXPECT_TRUE(at::equal(saved.child(0).p2(0), saved.p2(0)));
  EXPECT_TRUE(at::equal(saved.child(1).p2(0), at::tensor({3.0F})));
  EXPECT_TRUE(at::equal(input, at::tensor({1.0F + 1.0F / 1024, 3.0F}))) << "others still read it";
}

// Units of W point to a container's children while others are added.
TEST(Saved, ChildrenStayWhereTheyAre) {
  Saved saved;
  Saved* first = &saved.child(0);
  for (size_t i = 1; i < 100; ++i) saved.child(i).keep_until_p2(at::full({1}, static_cast<double>(i)));
  EXPECT_EQ(&saved.child(0), first);
  double sum = 0;
  int visited = 0;
  saved.visit_p2([&](const at::Tensor& t) {
    sum += t.item<double>();
    ++visited;
  });
  EXPECT_EQ(visited, 99);
  EXPECT_EQ(sum, 99 * 100 / 2);
}

TEST(Saved, ReleaseDropsEverythingInChildrenToo) {
  Saved saved;
  std::vector<Watch> watches;
  for (Saved* one : {&saved, &saved.child(0), &saved.child(1).child(0)}) {
    at::Tensor p1 = at::ones({1});
    at::Tensor p2 = at::ones({1});
    watches.emplace_back(p1);
    watches.emplace_back(p2);
    one->keep_until_p1(std::move(p1));
    one->keep_until_p2(std::move(p2));
  }
  for (const Watch& watch : watches) EXPECT_FALSE(watch.gone());
  saved.release();
  for (const Watch& watch : watches) EXPECT_TRUE(watch.gone());
}

TEST(Saved, ExclusiveMeansNoOtherHandleAndNoView) {
  at::Tensor tensor = at::ones({2, 3});
  EXPECT_TRUE(exclusively_owned(tensor));
  {
    const at::Tensor other = tensor;
    EXPECT_FALSE(exclusively_owned(tensor));
  }
  {
    const at::Tensor view = tensor.view({6});
    EXPECT_FALSE(exclusively_owned(tensor));
    EXPECT_FALSE(exclusively_owned(view));
  }
  EXPECT_TRUE(exclusively_owned(tensor));
  EXPECT_FALSE(exclusively_owned(at::Tensor()));
  EXPECT_TRUE(exclusively_owned(as_contiguous(std::move(tensor)))) << "the handle moves through";
}

// The until-p1 tensors of a layer are released after its backward-p1 and before that of the layer below. A probe below
// the layers checks this.
class Probe : public Layer {
 public:
  Values forward(Values x, Context&, Saved&) override { return x; }
  Values backward_p1(Values dy, Context&, Saved&) override {
    if (look) look();
    return dy;
  }
  std::function<void()> look;
};

TEST(Saved, UntilP1GoesBeforeTheLayersBelowRun) {
  auto probe = std::make_unique<Probe>();
  Probe& bottom = *probe;
  auto model = make_sequential(std::move(probe), std::make_unique<RmsNorm>("g", 6, 1e-5, at::kFloat),
                               std::make_unique<GatedUnit>(Gate::kSilu));
  make_parameters(*model);
  MicroBatch micro_batch(*model);
  LiveBytes bytes;
  at::Tensor x = random({4, 6}, 1, at::kFloat);
  const Watch input(x);
  micro_batch.forward(std::move(x));
  EXPECT_FALSE(input.gone());
  int64_t left = -1;
  bottom.look = [&] {
    EXPECT_TRUE(input.gone()) << "the norm's input is still alive";
    left = bytes.now();
  };
  const at::Tensor dx = micro_batch.p1(random({4, 3}, 2, at::kFloat));
  EXPECT_EQ(left, static_cast<int64_t>(4 * 6 * sizeof(float))) << "more is alive than dx, which is on its way down";
}

// After backward-p1, a leaf keeps in Saved only the tensors that backward-p2 reads.
TEST_P(EveryLayer, KeepsNothingAfterW) {
  const LayerCase& c = GetParam();
  auto layer = c.make(at::kFloat);
  make_parameters(*layer);
  const auto micro_batch = c.micro_batch(*layer, 2, 1, at::kFloat);
  micro_batch->evaluate(c.make_input(2, 1, at::kFloat));  // creates the rope tables
  LiveBytes bytes;
  const at::Tensor y = micro_batch->forward(c.make_input(2, 1, at::kFloat));
  EXPECT_GT(bytes.now(), 0);
  micro_batch->p1(c.make_gradient(y, 1));
  micro_batch->p2();
  EXPECT_EQ(bytes.now(), static_cast<int64_t>(y.storage().nbytes())) << "more than y is alive";
}

TEST_P(EveryLayer, EvaluationSavesNothing) {
  const LayerCase& c = GetParam();
  auto layer = c.make(at::kFloat);
  make_parameters(*layer);
  const auto micro_batch = c.micro_batch(*layer, 2, 1, at::kFloat);
  micro_batch->evaluate(c.make_input(2, 1, at::kFloat));  // creates the rope tables
  LiveBytes bytes;
  at::Tensor y = micro_batch->evaluate(c.make_input(2, 1, at::kFloat));
  EXPECT_GT(bytes.peak(), 0);
  y = at::Tensor();
  EXPECT_EQ(bytes.now(), 0);
  int64_t kept = 0;
  micro_batch->saved.visit_p2([&](const at::Tensor&) { ++kept; });
  EXPECT_EQ(kept, 0);
}

TEST_P(EveryLayer, BackwardWithoutForwardIsAnError) {
  const LayerCase& c = GetParam();
  auto layer = c.make(at::kFloat);
  make_parameters(*layer);
  const auto micro_batch = c.micro_batch(*layer, 2, 1, at::kFloat);
  const at::Tensor y = micro_batch->evaluate(c.make_input(2, 1, at::kFloat));
  expect_error([&] { micro_batch->p1(c.make_gradient(y, 1)); }, {"backward-p1", "forward"});
}

TEST_P(EveryLayer, SecondBackwardIsAnError) {
  const LayerCase& c = GetParam();
  auto layer = c.make(at::kFloat);
  make_parameters(*layer);
  const auto micro_batch = c.micro_batch(*layer, 2, 1, at::kFloat);
  const at::Tensor y = micro_batch->forward(c.make_input(2, 1, at::kFloat));
  micro_batch->p1(c.make_gradient(y, 1));
  expect_error([&] { micro_batch->p1(c.make_gradient(y, 1)); }, {"backward-p1", "forward"});
}

TEST_P(EveryLayer, WBeforeIIsAnError) {
  const LayerCase& c = GetParam();
  auto layer = c.make(at::kFloat);
  make_parameters(*layer);
  const auto micro_batch = c.micro_batch(*layer, 2, 1, at::kFloat);
  micro_batch->forward(c.make_input(2, 1, at::kFloat));
  if (micro_batch->p2_units().empty()) {
    micro_batch->saved.visit_p2([](const at::Tensor&) { ADD_FAILURE() << "a layer without W keeps a tensor for it"; });
    return;
  }
  expect_error([&] { micro_batch->p2(); },
               {"backward-p2", c.batch_statistics ? "before its backward-p1" : "saved tensor "});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
