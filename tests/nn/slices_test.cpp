// A sequence in slices gives what it gives as a whole: F first to last, I last to first, each slice with its own Saved.
// In float64, y, dx and the gradients of weights agree to 1e-10 of their largest number.
#include <set>

#include "tests/nn/layer_cases.h"
#include "twobp/models/recompute/recompute_layer.h"
#include "twobp/nn/layers/attention.h"
#include "twobp/nn/layers/dropout.h"

namespace twobp::TWOBP_FILE {
namespace {

using namespace test;

constexpr double kBound = 1e-10;

struct Result {
  at::Tensor y;  // a loss: the sum over slices
  at::Tensor dx;
  std::vector<at::Tensor> dw;
};

// The positions where slices begin, and the end.
using Cuts = std::vector<int64_t>;

class Sliced {
 public:
  Sliced(Layer& layer, Fields fields, Cuts cuts)
      : layer_(layer), fields_(std::move(fields)), cuts_(std::move(cuts)), saved_(cuts_.size() - 1) {
    for (size_t s = 0; s + 1 < cuts_.size(); ++s) {
      if (s > 0) saved_[s].follow(&saved_[s - 1]);
      of_slice_.push_back(slice_of(fields_, cuts_[s], length(s)));
    }
  }

  // x (B, S, C), or undefined for a layer that reads the fields.
  at::Tensor forward(const at::Tensor& x) {
    std::vector<at::Tensor> y;
    for (size_t s = 0; s + 1 < cuts_.size(); ++s) {
      Context c = context(s);
      y.push_back(only(layer_.forward(values_of(part(x, s)), c, saved_[s])));
    }
    if (y[0].dim() == 0) return at::stack(y).sum();
    return at::cat(y, 1);
  }
  at::Tensor backward(const at::Tensor& dy) {
    std::vector<at::Tensor> dx(cuts_.size() - 1);
    for (size_t s = cuts_.size() - 1; s-- > 0;) {
      Context c = context(s);
      dx[s] = only(layer_.backward_p1(values_of(part(dy, s)), c, saved_[s]));
      saved_[s].release_p1();
      std::vector<P2Unit> units;
      layer_.collect_p2(saved_[s], units);
      for (const P2Unit& unit : units) {
        unit.layer->backward_p2({&unit.saved, 1});
        unit.saved->release_p2();
      }
      EXPECT_TRUE(saved_[s].to_later.empty() && saved_[s].from_later.empty()) << "slice " << s;
    }
    return dx[0].defined() ? at::cat(dx, 1) : at::Tensor();
  }

 private:
  int64_t length(size_t s) const { return cuts_[s + 1] - cuts_[s]; }
  at::Tensor part(const at::Tensor& x, size_t s) const {
    return x.defined() ? x.narrow(1, cuts_[s], length(s)).clone() : at::Tensor();
  }
  Context context(size_t s) const {
    Context context;
    context.fields = &of_slice_[s];
    context.slice = {&fields_, cuts_.back(), length(s)};
    context.past = cuts_[s];
    return context;
  }

  Layer& layer_;
  Fields fields_;
  Cuts cuts_;
  std::vector<Fields> of_slice_;
  std::vector<Saved> saved_;
};

Cuts random_cuts(int64_t positions, uint64_t seed) {
  std::set<int64_t> cuts = {0, positions};
  const at::Tensor drawn = random_ids({4}, positions, seed);
  for (int64_t i = 0; i < 4; ++i) cuts.insert(drawn[i].item<int64_t>());
  return {cuts.begin(), cuts.end()};
}

void expect_equal(const Result& actual, const Result& expected) {
  const auto expect = [](const at::Tensor& a, const at::Tensor& b, const std::string& what) {
    ASSERT_EQ(a.defined(), b.defined()) << what;
    if (b.defined()) expect_within(a, b, kBound * std::max(1.0, largest(b)), what);
  };
  expect(actual.y, expected.y, "y");
  expect(actual.dx, expected.dx, "dx");
  ASSERT_EQ(actual.dw.size(), expected.dw.size());
  for (size_t i = 0; i < expected.dw.size(); ++i) expect(actual.dw[i], expected.dw[i], concat("dw ", i));
}

// Runs x (B, S, ...) as a whole and in slices.
void expect_slices_agree(Layer& layer, const at::Tensor& x, const Fields& fields, const at::Tensor& dy,
                         int64_t positions, uint64_t seed) {
  const std::vector<Parameter*> parameters = make_parameters(layer);
  forget_grads(parameters);
  MicroBatch whole(layer, fields);
  Result expected;
  expected.y = whole.forward(x.defined() ? x.clone() : x).clone();
  expected.dx = whole.p1(dy.defined() ? dy.clone() : at::Tensor());
  whole.p2();
  expected.dw = copy_grads(parameters);
  for (uint64_t i = 0; i < 3; ++i) {
    const Cuts cuts = random_cuts(positions, seed + i);
    SCOPED_TRACE(concat("cut at ", at::IntArrayRef(cuts)));
    forget_grads(parameters);
    Sliced sliced(layer, fields, cuts);
    Result actual;
    actual.y = sliced.forward(x);
    actual.dx = sliced.backward(dy);
    actual.dw = copy_grads(parameters);
    expect_equal(actual, expected);
  }
}

// Layers of models that slices are for. The others read all positions at once, or have none.
bool takes_slices(const LayerCase& c) {
  static const std::vector<std::string> prefixes = {
      "Embedding",    "LearnedPositions", "Linear", "RmsNorm", "Attention",  "QueryKeyNorm", "SwiGlu",    "GeGlu",
      "CrossEntropy", "Nested",           "Conv1d", "Scan",    "MambaMixer", "ResidualOf",   "LayerNorm", "Latent"};
  for (const std::string& prefix : prefixes) {
    if (c.name.starts_with(prefix)) return true;
  }
  return false;
}

TEST_P(EveryLayer, SlicesGiveTheWhole) {
  const LayerCase& c = GetParam();
  if (!takes_slices(c)) GTEST_SKIP() << "this layer does not take slices";
  const auto layer = c.make(at::kDouble);
  const at::Tensor x = c.make_input(2, 5, at::kDouble);
  if (x.defined() && x.dim() < 3) GTEST_SKIP() << "its rows are no sequences";
  const Fields fields = c.fields ? c.fields(2, 6, at::kDouble) : Fields();
  const int64_t positions = x.defined() ? x.size(1) : fields.begin()->second.size(1);
  MicroBatch once(*layer, fields);
  make_parameters(*layer);
  const at::Tensor dy = c.make_gradient(once.forward(x.defined() ? x.clone() : x), 7);
  expect_slices_agree(*layer, x, fields, dy, positions, 100);
}

// The mask of a slice is its part of the sequence's.
TEST(Slices, DropoutMasksAreThoseOfTheSequence) {
  Dropout dropout(0.4, "dropout");
  const at::Tensor x = random({2, 23, 7}, 1);
  expect_slices_agree(dropout, x, {}, random({2, 23, 7}, 2), 23, 3);
  for (const AttentionShape& shape : {AttentionShape{4, 2, 6, {100}}, AttentionShape{4, 2, 6, {100}, -1, 9}}) {
    Attention attention(shape, at::kDouble, 0.3, "attention");
    expect_slices_agree(attention, random({2, 70, shape.packed()}, 4), {},
                        random({2, 70, shape.heads * shape.head_dim}, 5), 70, 6);
  }
}

// F is repeated with other slices' keys in place, and what it keeps for them is less.
TEST(Slices, RecomputesActivations) {
  for (const bool interleaved : {false, true}) {
    AttentionShape shape{4, interleaved ? 4 : 2, 6, {100}};
    shape.interleaved = interleaved;
    RecomputeLayer layer(std::make_unique<Attention>(shape, at::kDouble), Recompute::kActivations);
    expect_slices_agree(layer, random({2, 40, shape.packed()}, 1), {}, random({2, 40, shape.heads * shape.head_dim}, 2),
                        40, 3);
  }
}

// Of layers that mix positions: gradients of x and of the weights against (L(x + h) - L(x - h)) / 2h, at random
// numbers.
TEST_P(EveryLayer, SlicesAgreeWithFiniteDifferences) {
  const LayerCase& c = GetParam();
  const auto starts_with = [&](const char* prefix) { return c.name.starts_with(prefix); };
  if (!starts_with("Attention") && !starts_with("Scan") && !starts_with("Conv1d") && !starts_with("MambaMixer")) {
    GTEST_SKIP() << "this layer does not mix positions";
  }
  const auto layer = c.make(at::kDouble);
  const std::vector<Parameter*> parameters = make_parameters(*layer);
  at::Tensor x = c.make_input(2, 5, at::kDouble);
  const Fields fields = c.fields ? c.fields(2, 6, at::kDouble) : Fields();
  const Cuts cuts = random_cuts(x.size(1), 8);
  const at::Tensor dy = c.make_gradient(Sliced(*layer, fields, cuts).forward(x), 7);
  forget_grads(parameters);
  Sliced sliced(*layer, fields, cuts);
  sliced.forward(x);
  std::vector<std::pair<at::Tensor, at::Tensor>> moved = {{x, sliced.backward(dy)}};
  for (Parameter* parameter : parameters) moved.emplace_back(parameter->value, parameter->grad.clone());

  constexpr double kStep = 1e-5;
  for (size_t t = 0; t < moved.size(); ++t) {
    const auto [value, gradient] = moved[t];
    const at::Tensor flat = value.view(-1);
    const auto loss = [&](int64_t at, double step) {
      flat[at].add_(step);
      const double sum = (Sliced(*layer, fields, cuts).forward(x) * dy).sum().item<double>();
      flat[at].sub_(step);
      return sum;
    };
    const at::Tensor which = random_ids({5}, flat.numel(), 9 + t);
    for (int64_t i = 0; i < which.numel(); ++i) {
      const int64_t at = which[i].item<int64_t>();
      const double expected = (loss(at, kStep) - loss(at, -kStep)) / (2 * kStep);
      EXPECT_NEAR(gradient.reshape(-1)[at].item<double>(), expected, 1e-7 * std::max(1.0, largest(gradient)))
          << "tensor " << t << ", number " << at;
    }
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
