// Tests layers on LibTorch's operators. Dropout's masks must equal those of the kernels, and on a device other than the
// CPU, layers must compute the same as the operators on a CPU.
#include "twobp/nn/kernels/rows/operators.h"

#include <atomic>

#include <ATen/core/LegacyTypeDispatch.h>

#include "tests/expect_error.h"
#include "tests/nn/device/stand_in_device.h"
#include "tests/nn/layer_cases.h"
#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/kernels/rows/row_operations.h"
#include "twobp/nn/kernels/scan/scan_operators.h"
#include "twobp/nn/layers/attention.h"
#include "twobp/nn/layers/dropout.h"
#include "twobp/nn/parameter.h"

namespace twobp::TWOBP_FILE {
namespace {

using namespace test;

TEST(Operators, DrawTheMasksOfTheKernels) {
  const DropoutRate rate(0.3, "layer");
  Context context;
  context.seed = 7;
  context.step = 8;
  context.micro_batch = 9;
  const DropoutMask mask = rate.mask(context);
  for (const int64_t cols : {1, 7, 8, 9, 1000, 1024, 1029, 3000}) {
    const at::Tensor x = random({5, cols}, 1, at::kFloat);
    at::Tensor expected = at::empty_like(x);
    dropout_rows(x, {}, expected, cols, mask, 0, 5);
    at::Tensor actual = at::zeros_like(x);
    const OperatorsEverywhere operators;
    dropout_rows(x, {}, actual, cols, mask, 0, 2);
    dropout_rows(x, {}, actual, cols, mask, 2, 5);
    EXPECT_TRUE(same_bits(actual, expected)) << cols;
    EXPECT_GT(expected.eq(0).sum().item<int64_t>(), cols < 1000 ? -1 : 1000) << cols;
  }
}

// A copy in float32 of all logits would take 64 MiB.
TEST(Operators, CapLogitsABlockOfRowsAtATime) {
  const at::Tensor x = random({64, 1 << 18}, 1, at::kFloat).mul_(3).to(at::kBFloat16);
  const at::Tensor labels = at::arange(64, at::kLong).mul_(4000);
  labels[5] = -100;
  at::Tensor expected = x.clone();
  cross_entropy(expected, labels, -100, 0.5, true, 2);
  at::Tensor exact = x.clone();
  soft_cap(exact, 2);
  exact = exact.to(at::kDouble);  // kernels that are not vectorised sum float32 one by one
  const double loss = cross_entropy(exact, labels, -100, 0.5, false, 0).item<double>();
  const OperatorsEverywhere operators;
  for (const bool gradient : {true, false}) {
    at::Tensor actual = x.clone();
    const LiveBytes bytes;
    EXPECT_NEAR(cross_entropy(actual, labels, -100, 0.5, gradient, 2).item<double>(), loss, 1e-6 * loss);
    EXPECT_LT(bytes.peak(), int64_t{6 * 32} << 20);
    if (gradient) EXPECT_TRUE(at::allclose(actual.to(at::kFloat), expected.to(at::kFloat), 1.6e-2, 1e-7));
  }
  at::Tensor capped = x.clone();
  const LiveBytes bytes;
  soft_cap(capped, 2);
  EXPECT_LT(bytes.peak(), int64_t{4 * 32} << 20);
  EXPECT_TRUE(at::allclose(capped, x.div(2).tanh().mul(2), 2e-2, 1e-3));
}

// Uses blocks of 128 and 5 queries.
TEST(Operators, AttendAsTheKernelsDo) {
  Context context;
  context.seed = 7;
  const DropoutMask dropout = DropoutRate(0.3, "layer").mask(context);
  PackedAttention causal{/*heads=*/4, /*kv_heads=*/2, /*head_dim=*/6, /*causal=*/true, {}, {}};
  PackedAttention bidirectional = causal;
  bidirectional.causal = false;
  bidirectional.dropout = dropout;
  PackedAttention window = causal;
  window.window = 70;
  window.dropout = dropout;
  PackedAttention documents = causal;
  const at::Tensor starts = at::zeros({2, 133}, at::kLong);
  starts[0].narrow(0, 40, 93).fill_(40);
  starts[1].narrow(0, 1, 131).fill_(1);
  starts[1][132] = 132;
  documents.documents = std::make_shared<const DocumentPlaces>(starts);
  documents.cap = 0.8;
  documents.scale = 0.5;
  PackedAttention both = documents;
  both.window = 33;
  both.dropout = dropout;
  PackedAttention interleaved = causal;
  interleaved.kv_heads = 4;
  interleaved.interleaved = true;
  PackedAttention narrow = window;
  narrow.value_dim = 4;
  for (const PackedAttention& attention : {causal, bidirectional, window, documents, both, interleaved, narrow}) {
    SCOPED_TRACE(concat("window ", attention.window, ", cap ", attention.cap, ", values ", attention.value_width()));
    const at::Tensor packed = random({2, 133, attention.packed()}, 1);
    const at::Tensor dout = random({2, 133, attention.out_width()}, 2);
    const auto run = [&] {
      std::vector<at::Tensor> results = {at::empty_like(dout), at::empty({2, 4, 133}, packed.options()),
                                         at::empty_like(packed)};
      packed_attention_forward(packed, attention, results[0], results[1]);
      packed_attention_backward(packed, attention, results[0], results[1], dout, results[2]);
      return results;
    };
    const auto expected = run();
    const OperatorsEverywhere operators;
    const auto actual = run();
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_LT(largest(actual[i] - expected[i]), 1e-12 * largest(expected[i])) << i;
    EXPECT_FALSE(same_bits(actual[2], expected[2])) << "both runs used the same implementation";
  }
}

// Documents of one sample attend as each of them does alone.
TEST(Operators, DocumentsAttendAlone) {
  PackedAttention attention{/*heads=*/2, /*kv_heads=*/1, /*head_dim=*/5, /*causal=*/true, {}, {}};
  const std::vector<int64_t> lengths = {3, 70, 1, 59};  // of one sample, over three blocks of queries
  at::Tensor starts = at::empty({1, 133}, at::kLong);
  for (int64_t begin = 0, i = 0; begin < 133; begin += lengths[i++])
    starts[0].narrow(0, begin, lengths[i]).fill_(begin);
  const at::Tensor packed = random({1, 133, attention.packed()}, 1);
  const at::Tensor dout = random({1, 133, 10}, 2);
  const auto run = [&](const at::Tensor& x, const at::Tensor& dy) {
    std::vector<at::Tensor> results = {at::empty_like(dy), at::empty({1, 2, x.size(1)}, x.options()),
                                       at::empty_like(x)};
    packed_attention_forward(x, attention, results[0], results[1]);
    packed_attention_backward(x, attention, results[0], results[1], dy, results[2]);
    return results;
  };
  attention.documents = std::make_shared<const DocumentPlaces>(starts);
  const auto together = run(packed, dout);
  attention.documents = nullptr;
  int64_t begin = 0;
  for (const int64_t length : lengths) {
    const auto alone = run(packed.narrow(1, begin, length).contiguous(), dout.narrow(1, begin, length).contiguous());
    for (const size_t i : {0, 2})
      EXPECT_LT(largest(together[i].narrow(1, begin, length) - alone[i]), 1e-13) << begin << " " << i;
    begin += length;
  }
}

struct Results {
  at::Tensor y, dx;
  std::vector<at::Tensor> dw;
};

Results run(const LayerCase& c, at::Device device) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;  // as on ranks
  const std::unique_ptr<Layer> layer = c.make(at::kFloat);
  const std::vector<Parameter*> parameters = make_parameters(*layer);
  for (Parameter* parameter : parameters_of(*layer)) parameter->move_to(device);
  const std::unique_ptr<MicroBatch> micro_batch = c.micro_batch(*layer, 2, 3, at::kFloat);
  const auto there = [&](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.to(device, false, true) : tensor;
  };
  const auto back = [](const at::Tensor& tensor) { return tensor.defined() ? tensor.cpu() : tensor; };
  const at::Tensor x = c.make_input(2, 3, at::kFloat);
  Results results;
  at::Tensor y = micro_batch->forward(there(x));
  results.y = back(y).clone();
  const at::Tensor dy = c.make_gradient(results.y, 3);
  y.reset();
  results.dx = back(micro_batch->p1(there(dy)));
  micro_batch->p2();
  for (const Parameter* parameter : parameters) {
    if (parameter->has_grad()) results.dw.push_back(back(parameter->grad));
  }
  return results;
}

void expect_each(const Results& actual, const Results& expected, bool (*same)(const at::Tensor&, const at::Tensor&)) {
  EXPECT_TRUE(same(actual.y, expected.y));
  ASSERT_EQ(actual.dx.defined(), expected.dx.defined());
  if (expected.dx.defined()) {
    EXPECT_TRUE(same(actual.dx, expected.dx));
  }
  ASSERT_EQ(actual.dw.size(), expected.dw.size());
  for (size_t i = 0; i < expected.dw.size(); ++i) EXPECT_TRUE(same(actual.dw[i], expected.dw[i])) << i;
}

bool about_the_same(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && largest(a.to(at::kDouble) - b.to(at::kDouble)) <= 1e-4 * largest(b) + 1e-6;
}

TEST(OnStandIn, AddsRowsInPlace) {
  const at::Device device = stand_in_device(0).where();
  at::Tensor rows = at::zeros({5000, 16}, at::TensorOptions(at::kFloat).device(device));
  const at::Tensor ids = at::tensor({3, 4999, 3}, at::kLong).to(device);
  const at::Tensor from = random({3, 16}, 1, at::kFloat);
  const at::Tensor from_there = from.to(device);
  const int64_t before = allocated();
  operators::add_rows_at(rows, ids, from_there);
  EXPECT_LT(allocated() - before, static_cast<int64_t>(rows.nbytes()) / 10)
      << "the rows are added in place, without a second table";
  const at::Tensor here = rows.cpu();
  EXPECT_TRUE(same_bits(here[3], from[0] + from[2]));
  EXPECT_TRUE(same_bits(here[4999], from[1]));
  EXPECT_EQ(here.count_nonzero().item<int64_t>(), 32);
}

// Numbers are rounded where they are stored, and nowhere else.
TEST(Operators, ScansNarrowTypesInFloat32) {
  constexpr int64_t kBatch = 2, kSequence = kScanChunk + 8, kChannels = 5, kState = 3;
  const auto narrow = [](at::IntArrayRef sizes, uint64_t seed) {
    return random(sizes, seed, at::kFloat).to(at::kBFloat16);
  };
  ScanTensors in;
  in.x = narrow({kBatch, kSequence, kChannels}, 1);
  in.delta = narrow({kBatch, kSequence, kChannels}, 2);
  in.z = narrow({kBatch, kSequence, kChannels}, 3);
  in.bc = narrow({kBatch, kSequence, 2 * kState}, 4);
  in.a = -random({kState, kChannels}, 5, at::kFloat).abs();
  in.d = random({kChannels}, 6, at::kFloat);
  in.delta_bias = random({kChannels}, 7, at::kFloat);
  const at::Tensor dout = narrow({kBatch, kSequence, kChannels}, 8);
  struct Results {
    at::Tensor out, borders;
    ScanGradientTensors gradients;
  };
  const auto scan = [&](at::ScalarType type) {
    ScanTensors from = in;
    for (at::Tensor* tensor : {&from.x, &from.delta, &from.z, &from.bc}) *tensor = tensor->to(type);
    Results made;
    made.out = at::empty_like(from.x);
    made.borders = at::empty({kBatch, 1, kState, kChannels});
    operators::scan_forward(from, made.out, made.borders, {}, {});
    ScanGradientTensors& to = made.gradients;
    for (at::Tensor* tensor : {&to.dx, &to.ddelta, &to.dz}) *tensor = at::empty_like(from.x);
    to.dbc = at::empty({kBatch, kSequence, 2 * kState});
    to.da = at::empty({kBatch, kState, kChannels});
    to.dd = at::empty({kBatch, kChannels});
    to.ddelta_bias = at::empty({kBatch, kChannels});
    operators::scan_backward(from, dout.to(type), made.borders, to);
    return made;
  };
  const Results expected = scan(at::kFloat);
  const Results actual = scan(at::kBFloat16);
  const auto same = [](const at::Tensor& a, const at::Tensor& b) { return same_bits(a, b.to(a.scalar_type())); };
  EXPECT_TRUE(same(actual.out, expected.out));
  EXPECT_TRUE(same(actual.borders, expected.borders));
  EXPECT_TRUE(same(actual.gradients.dx, expected.gradients.dx));
  EXPECT_TRUE(same(actual.gradients.ddelta, expected.gradients.ddelta));
  EXPECT_TRUE(same(actual.gradients.dz, expected.gradients.dz));
  EXPECT_TRUE(same(actual.gradients.dbc, expected.gradients.dbc));
  EXPECT_TRUE(same(actual.gradients.da, expected.gradients.da));
  EXPECT_TRUE(same(actual.gradients.dd, expected.gradients.dd));
  EXPECT_TRUE(same(actual.gradients.ddelta_bias, expected.gradients.ddelta_bias));
}

// Their number does not depend on the width of the rows.
TEST(OnStandIn, DrawsAMaskByFewOperators) {
  const at::Device device = stand_in_device(0).where();
  const at::Tensor rows = at::arange(3, at::kLong);
  const DropoutMask mask = DropoutRate(0.3, "layer").mask(Context());
  const auto options = at::TensorOptions(at::kFloat);
  const at::Tensor here = operators::dropout_factors(mask, rows, 4096, options);
  const at::Tensor rows_there = rows.to(device);
  const int before = operators_run();
  const at::Tensor there = operators::dropout_factors(mask, rows_there, 4096, options.device(device));
  EXPECT_LE(operators_run() - before, 100);
  EXPECT_TRUE(same_bits(there.cpu(), here));
}

// A gradient of 16-bit products is not rounded to 16 bits on its way into its float32 sum.
TEST(OnStandIn, RoundsNoProductOfWeightGradients) {
  const Device device = stand_in_device(0);
  Parameter weight({{"w", 40}}, {40, 30}, at::kBFloat16, 1);
  weight.allocate_value(1);
  weight.move_to(device.where());
  weight.allocate_grad();
  const at::Tensor a = random({40, 64}, 1, at::kFloat).to(at::kBFloat16);
  const at::Tensor b = random({64, 30}, 2, at::kFloat).to(at::kBFloat16);
  for (int i = 0; i < 2; ++i) weight.accumulate_product(a.to(device.where()), b.to(device.where()));
  const at::Tensor exact = 2 * at::mm(a.to(at::kDouble), b.to(at::kDouble));
  EXPECT_LT(largest(weight.grad.cpu().to(at::kDouble) - exact), 1e-5 * largest(exact));
}

// A recorded step reads them there.
TEST(LossFactors, HaveTheBitsOfNumbersOnADevice) {
  constexpr double kWeight = 1. / 37, kScale = 3 << 16, kForm = 1. / 3;
  std::vector<at::Device> devices = {stand_in_device(0).where()};
  if (at::hasCUDA()) devices.push_back(Device::open("cuda", 0).where());
  for (const at::Device device : devices) {
    const auto there = [&](double number) {
      return LossFactor(at::full({}, number, at::TensorOptions(at::kDouble).device(device)));
    };
    const LossFactor actual = there(kWeight) * kForm / 7 * there(kScale);
    const LossFactor expected = kWeight * kForm / 7 * kScale;
    EXPECT_EQ(actual.on_device().cpu().item<double>(), expected.number());
    expect_error([&] { (void)actual.number(); }, {"pipeline.graphs"});
    for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      SCOPED_TRACE(concat(device.str(), ' ', c10::toString(type)));
      at::Tensor x = random({3, 50}, 1, at::kDouble).to(type).to(device);
      at::Tensor same = x.clone();
      EXPECT_TRUE(same_bits((x * actual).cpu(), (x * expected).cpu()));
      EXPECT_TRUE(same_bits((x *= actual).cpu(), (same *= expected).cpu()));
      EXPECT_TRUE(same_bits(actual.scalar(type, device).cpu(), expected.scalar(type, device).cpu()));
    }
  }
}

TEST_P(EveryLayer, GivesTheSameOnADevice) {
  const at::Device device = stand_in_device(0).where();
  const OperatorsEverywhere operators;
  expect_each(
      run(GetParam(), device), run(GetParam(), at::kCPU),
      GetParam().other_way_on_cpu ? about_the_same
                                  : [](const at::Tensor& a, const at::Tensor& b) { return same_bits(a, b); });
}

TEST_P(EveryLayer, GivesAboutTheSameOnAGpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "needs a GPU, and a LibTorch for it";
  const at::Device device = Device::open("cuda", 0).where();
  const OperatorsEverywhere operators;
  expect_each(run(GetParam(), device), run(GetParam(), at::kCPU), about_the_same);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
