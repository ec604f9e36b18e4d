// Properties of batch norms, the bytes that ResNet's layers keep (counted by hand), and the model as a list of layers.
#include <set>

#include "tests/nn/layer_test_util.h"
#include "twobp/models/models.h"
#include "twobp/nn/layers/batch_norm.h"
#include "twobp/nn/layers/residual_block.h"

namespace twobp::TWOBP_FILE {
namespace {

using namespace test;

TEST(BatchNormFacts, OneRowHasNoVariance) {
  BatchNorm2d layer("n", 3, false, at::kFloat);
  make_parameters(layer);
  MicroBatch micro_batch(layer);
  expect_error(
      [&] {
        micro_batch.forward(at::ones({1, 1, 1, 3}, at::kFloat));
      },
      {"n.weight", "no variance", "micro_batch_size"});
  EXPECT_EQ(micro_batch.evaluate(at::ones({1, 1, 1, 3}, at::kFloat)).size(3), 3);
}

// The mean is large and the deviation small, so the sum of squares minus the squared mean would be noise.
TEST(BatchNormFacts, VarianceOfNumbersFarFromZero) {
  BatchNorm2d layer("n", 2, false, at::kFloat);
  make_parameters(layer);
  const at::Tensor x = random({4, 5, 5, 2}, 1, at::kDouble).add_(1000).to(at::kFloat);
  std::vector<Parameter*> parameters;
  layer.collect_parameters(parameters);
  parameters[3]->value.fill_(0);
  MicroBatch(layer).forward(x.clone());
  const at::Tensor expected = 0.1 * x.to(at::kDouble).view({-1, 2}).var(0, /*unbiased=*/true);
  expect_within(parameters[3]->value, expected, 1e-6, "running variance");
}

TEST(BatchNormFacts, ConstantChannelStaysFinite) {
  BatchNorm2d layer("n", 2, true, at::kFloat);
  make_parameters(layer);
  MicroBatch micro_batch(layer);
  EXPECT_TRUE(at::isfinite(micro_batch.forward(at::full({2, 3, 3, 2}, 7, at::kFloat))).all().item<bool>());
  EXPECT_TRUE(at::isfinite(micro_batch.p1(random({2, 3, 3, 2}, 1, at::kFloat))).all().item<bool>());
}

// Compares the bytes that live after F and after I, without y and dx, with these counts of 4-byte numbers. These are
// the saved tensors. A norm keeps 4 numbers per channel.
void expect_kept(Layer& layer, const std::vector<int64_t>& sizes, int64_t after_forward, int64_t after_p1,
                 int64_t p1_extra) {
  make_parameters(layer);
  MicroBatch micro_batch(layer);
  LiveBytes bytes;
  at::Tensor y = micro_batch.forward(random(sizes, 1, at::kFloat));
  const std::vector<int64_t> out = y.sizes().vec();
  y.reset();
  EXPECT_EQ(bytes.now(), 4 * after_forward) << "after F";
  at::Tensor dy = random(out, 2, at::kFloat);
  const int64_t before = bytes.now();
  bytes.restart_peak();
  at::Tensor dx = micro_batch.p1(std::move(dy));
  EXPECT_LE(bytes.peak() - before, 4 * p1_extra) << "most in I";
  dx.reset();
  micro_batch.saved.release_p1();
  EXPECT_EQ(bytes.now(), 4 * after_p1) << "after I";
  micro_batch.p2();
  EXPECT_EQ(bytes.now(), 0) << "after W";
}

// Sizes for which block sums and scales are small in comparison with the images.
constexpr int64_t kPixels = 4 * 8 * 8;
const std::vector<int64_t> kImage = {4, 8, 8, 16};

TEST(ResnetMemory, NormKeepsItsInputUntilI) {
  BatchNorm2d layer("n", 16, true, at::kFloat);
  expect_kept(layer, kImage, kPixels * 16 + 4 * 16, 0, 3 * 16 * 4);
}

// The convolution's input overwrites the norm's input.
TEST(ResnetMemory, NormConvKeepsOneImageBeforeIAndTwoAfter) {
  BatchNormReluConv2d layer("n", "w", {16, 4, 1, 1, 0}, at::kFloat);
  expect_kept(layer, kImage, kPixels * 16 + 4 * 16, kPixels * (16 + 4), kPixels * 16 + 3 * 16 * 4);
}

// After F: x, the narrow outputs of two convolutions and the wide output of the third. After I, for W: x, the inputs of
// the other two convolutions, and three gradients. Autograd additionally keeps both narrow normalised tensors and y.
TEST(ResnetMemory, Bottleneck) {
  ResidualBlock layer("b", {16, 16, 1, true}, at::kFloat);
  const int64_t scales = 4 * (4 + 4 + 16);
  expect_kept(layer, kImage, kPixels * (16 + 4 + 4 + 16) + scales, kPixels * (16 + 4 + 4 + 16 + 4 + 4),
              kPixels * (4 + 4 + 9 * 4 * 2) + 1000);
}

// A projection's output is kept until I, and its gradient until W.
TEST(ResnetMemory, BottleneckWithProjection) {
  ResidualBlock layer("b", {16, 32, 1, true}, at::kFloat);
  const int64_t scales = 4 * (8 + 8 + 32 + 32);
  expect_kept(layer, kImage, kPixels * (16 + 8 + 8 + 32 + 32) + scales, kPixels * (16 + 8 + 8 + 32 + 8 + 8 + 32),
              kPixels * (8 + 8 + 16 + 9 * 8 * 2) + 1000);
}

TEST(ResnetMemory, BasicBlock) {
  ResidualBlock layer("b", {16, 16, 1, false}, at::kFloat);
  const int64_t scales = 4 * (16 + 16);
  expect_kept(layer, kImage, kPixels * (16 + 16 + 16) + scales, kPixels * (16 + 16 + 16 + 16),
              kPixels * (16 + 16 + 9 * 16 * 2) + 1000);
}

std::vector<Parameter*> parameters_of(const std::unique_ptr<Layer>& layer) {
  std::vector<Parameter*> parameters;
  layer->collect_parameters(parameters);
  return parameters;
}

int64_t trained_numbers(const ResnetOptions& options) {
  int64_t count = 0;
  for (const LayerSpec& spec : resnet(options).layers) {
    const auto layer = spec.make();
    for (const Parameter* parameter : parameters_of(layer)) {
      if (!parameter->is_buffer()) count += parameter->numel();
    }
  }
  return count;
}

// The published numbers of parameters.
TEST(ResnetModel, HasAsManyParametersAsTheOriginals) {
  ResnetOptions options;
  EXPECT_EQ(trained_numbers(options), 25'557'032) << "50";
  options.depths = {3, 4, 23, 3};
  EXPECT_EQ(trained_numbers(options), 44'549'160) << "101";
  options.depths = {3, 8, 36, 3};
  EXPECT_EQ(trained_numbers(options), 60'192'808) << "152";
  options.block = "basic";
  options.widths = {64, 128, 256, 512};
  options.depths = {2, 2, 2, 2};
  EXPECT_EQ(trained_numbers(options), 11'689'512) << "18";
  options.depths = {3, 4, 6, 3};
  EXPECT_EQ(trained_numbers(options), 21'797'672) << "34";
}

// Kinds of layers are measured in the order in which they first appear. Each takes the output of the previous one.
TEST(ResnetModel, KindsChainAndAreAlike) {
  ResnetOptions options;
  options.depths = {2, 1, 3};
  options.widths = {8, 16, 24};
  options.stem = 4;
  const ModelSpec model = resnet(options);
  ASSERT_EQ(model.layers.size(), 8u);
  const Fields fields = {{"pixel_values", random({2, 3, 64, 48}, 1, at::kFloat)}, {"labels", random_ids({2}, 1000, 2)}};
  std::set<std::string> kinds;
  Context context;
  context.fields = &fields;
  Values x = {fields.at("pixel_values")};
  std::map<std::string, std::vector<int64_t>> sizes;
  for (const LayerSpec& spec : model.layers) {
    if (!kinds.insert(spec.kind).second) continue;
    const auto layer = spec.make();
    for (Parameter* parameter : parameters_of(layer)) parameter->allocate_value(1);
    Saved saved;
    x = layer->forward(std::move(x), context, saved);
    sizes[spec.kind] = x[0].sizes().vec();
  }
  EXPECT_EQ(kinds.size(), 7u) << "stem, head, and first and other blocks; a stage with one block has only a first";
  EXPECT_EQ(sizes.at("stem"), (std::vector<int64_t>{2, 16, 12, 4}));
  EXPECT_EQ(sizes.at("stage 0 block"), (std::vector<int64_t>{2, 16, 12, 8}));
  EXPECT_EQ(sizes.at("stage 2 block"), (std::vector<int64_t>{2, 4, 3, 24}));
  EXPECT_EQ(sizes.at("head"), std::vector<int64_t>{});
}

// The deviation is Kaiming's. The numbers do not depend on the memory format or on earlier layers.
TEST(ResnetModel, InitialWeightsDependOnSeedAndNameAlone) {
  Parameter weight({{"w", 64}}, {64, 32, 3, 3}, at::kFloat, 0.5);
  weight.allocate_value(3);
  EXPECT_TRUE(weight.value.is_contiguous());
  weight.store_channels_last();
  weight.allocate_value(3);
  EXPECT_TRUE(weight.value.is_contiguous(at::MemoryFormat::ChannelsLast));
  Parameter flat({{"w", 64}}, {64, 32 * 9}, at::kFloat, 0.5);
  flat.allocate_value(3);
  EXPECT_TRUE(same_bits(weight.value.contiguous().view({64, -1}), flat.value));
  const Convolution convolution("c", {32, 64, 3, 1, 1}, at::kFloat);
  Parameter kaiming = convolution.weight();
  kaiming.allocate_value(1);
  EXPECT_NEAR(kaiming.value.std().item<double>(), std::sqrt(2.0 / (9 * 64)), 0.001);
}

TEST(Buffer, IsNoWeight) {
  Parameter count = Parameter::buffer("n.count", {}, at::kLong, 3);
  count.freeze();
  count.allocate_value(1);
  count.allocate_grad();
  EXPECT_TRUE(count.is_buffer());
  EXPECT_FALSE(count.trainable());
  EXPECT_FALSE(count.grad.defined());
  EXPECT_EQ(count.numel(), 1);
  EXPECT_EQ(count.value.dim(), 0);
  EXPECT_EQ(count.value.item<int64_t>(), 3);
  EXPECT_TRUE(count.value.is_same(count.master));
  const auto parts = count.parts_of(count.master);
  ASSERT_EQ(parts.size(), 1u);
  EXPECT_EQ(parts[0].first, "n.count");
  EXPECT_TRUE(parts[0].second.is_same(count.master));
  EXPECT_FALSE(Parameter("w", at::ones({2})).is_buffer());
}

// A convolution's gradient is a matrix for products, with columns in memory order, and otherwise four-dimensional.
TEST(Buffer, GradientsOfConvolutionsAccumulate) {
  const at::Tensor a = random({2, 5}, 1), b = random({5, 12}, 2), c = random({2, 3, 2, 2}, 3);
  for (const bool channels_last : {true, false}) {
    Parameter weight({{"w", 2}}, {2, 3, 2, 2}, at::kDouble, 1);
    if (channels_last) weight.store_channels_last();
    weight.allocate_grad();
    weight.accumulate_product(a, b);
    weight.accumulate(c);
    const at::Tensor product = at::mm(a, b);
    EXPECT_TRUE(
        same_bits(weight.grad,
                  (channels_last ? product.view({2, 2, 2, 3}).permute({0, 3, 1, 2}) : product.view({2, 3, 2, 2})) + c));
    weight.forget_grad();
    weight.accumulate(c);
    EXPECT_TRUE(same_bits(weight.grad, c)) << "the first one overwrites";
  }
}

TEST(ResnetModel, ImpossibleOnes) {
  ResnetOptions options;
  options.depths = {1};
  options.widths = {8, 8, 8, 8};
  expect_error([&] { resnet(options); }, {"4 widths", "1 depths"});
  options = {};
  options.depths = {1, 1, 0, 1};
  expect_error([&] { resnet(options); }, {"at least 1"});
  options = {};
  options.widths = {256, 512, 30, 2048};
  expect_error([&] { resnet(options); }, {"30", "multiple of 4"});
}

TEST(ResnetModel, ImagesOfAnotherKind) {
  ResnetOptions options;
  const auto stem = resnet(options).layers[0].make();
  make_parameters(*stem);
  MicroBatch micro_batch(*stem);
  expect_error(
      [&] {
        micro_batch.forward(at::zeros({2, 1, 64, 64}, at::kFloat));
      },
      {"pixel_values", "(batch, 3, height, width)", "[2, 1, 64, 64]"});
  expect_error([&] { micro_batch.forward(at::zeros({2, 3, 64, 64}, at::kLong)); }, {"pixel_values", "Long"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
