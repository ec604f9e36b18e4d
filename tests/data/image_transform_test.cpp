// Tests crop, resize, flip and normalisation, and their random draws.
#include "twobp/data/image_transform.h"

#include <cmath>
#include <map>
#include <utility>

#include <gtest/gtest.h>

#include "tests/train/helpers.h"
#include "twobp/data/data.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_error;

ImageOptions options(int64_t size, Crop crop = Crop::kNone, int64_t channels = 1) {
  ImageOptions out;
  out.channels = channels;
  out.height = size;
  out.width = size;
  out.crop = crop;
  return out;
}

// Returns an image (1, H, W) with the values 10 y + x.
at::Tensor numbered(int64_t height, int64_t width) {
  const at::Tensor rows = at::arange(height).unsqueeze(1) * 10;
  return (rows + at::arange(width)).unsqueeze(0).to(at::kByte);
}

at::Tensor apply(const ImageTransform& transform, const at::Tensor& image, const ImageDraw& draw) {
  const ImageOptions& shape = transform.options();
  at::Tensor out = at::full({shape.channels, shape.height, shape.width}, -99.0F);
  transform.apply(image, draw, out.data_ptr<float>());
  return out;
}

at::Tensor evaluate(const ImageTransform& transform, const at::Tensor& image) {
  return apply(transform, image, transform.draw(image.size(1), image.size(2), 1, kEvaluation, 0));
}

TEST(ImageTransform, ScalesBytesToZeroToOneThenNormalises) {
  ImageOptions plain = options(2);
  const at::Tensor image = at::tensor({0, 51, 102, 255}, at::kByte).view({1, 2, 2});
  EXPECT_TRUE(
      at::allclose(evaluate(ImageTransform(plain), image), at::tensor({0.0F, 0.2F, 0.4F, 1.0F}).view({1, 2, 2})));
  plain.mean = {0.2};
  plain.std = {0.5};
  EXPECT_TRUE(
      at::allclose(evaluate(ImageTransform(plain), image), at::tensor({-0.4F, 0.0F, 0.4F, 1.6F}).view({1, 2, 2})));
  // Floats are not divided by 255.
  EXPECT_TRUE(at::allclose(evaluate(ImageTransform(plain), at::tensor({0.2F, 1.2F, 2.2F, -0.8F}).view({1, 2, 2})),
                           at::tensor({0.0F, 2.0F, 4.0F, -2.0F}).view({1, 2, 2})));
}

TEST(ImageTransform, RepeatsOneChannelAndNormalisesEach) {
  ImageOptions three = options(1, Crop::kNone, 3);
  three.mean = {0, 0.5, 1};
  const at::Tensor grey = at::full({1, 1, 1}, 255, at::kByte);
  EXPECT_TRUE(at::allclose(evaluate(ImageTransform(three), grey), at::tensor({1.0F, 0.5F, 0.0F}).view({3, 1, 1})));
  const at::Tensor colours = at::tensor({0, 255, 51}, at::kByte).view({1, 1, 3}).permute({2, 0, 1});
  EXPECT_TRUE(at::allclose(evaluate(ImageTransform(three), colours), at::tensor({0.0F, 0.5F, -0.8F}).view({3, 1, 1})));
  expect_error(
      [&] {
        evaluate(ImageTransform(three), at::zeros({2, 1, 1}, at::kByte));
      },
      {"2 channels", "must have 3 or 1"});
}

TEST(ImageTransform, EvaluatesTheSquareInTheCentre) {
  // Columns 2 to 6 of 5 x 9 are taken. They need no scaling.
  const at::Tensor image = numbered(5, 9);
  EXPECT_TRUE(at::allclose(evaluate(ImageTransform(options(5)), image), image.narrow(2, 2, 5).to(at::kFloat) / 255));
  const ImageDraw inner = ImageTransform(options(5, Crop::kResized)).draw(64, 80, 1, kEvaluation, 0);
  EXPECT_EQ(inner.height, 56);
  EXPECT_EQ(inner.width, 56);
  EXPECT_EQ(inner.top, 4);
  EXPECT_EQ(inner.left, 12);
  // If the result is not square, the largest part with its proportions is taken.
  ImageOptions wide = options(2);
  wide.width = 4;
  const ImageDraw draw = ImageTransform(wide).draw(10, 12, 1, kEvaluation, 0);
  EXPECT_EQ(draw.height, 6);
  EXPECT_EQ(draw.width, 12);
  EXPECT_EQ(draw.top, 2);
}

// This is the antialiased bilinear filter (a triangle as wide as the scale), written out in double.
at::Tensor resized(const at::Tensor& image, int64_t size) {
  const auto weights = [](int64_t from, int64_t to) {
    at::Tensor out = at::zeros({to, from}, at::kDouble);
    const double scale = static_cast<double>(from) / static_cast<double>(to);
    const double reach = std::max(scale, 1.0);
    for (int64_t i = 0; i < to; ++i) {
      const double centre = scale * (static_cast<double>(i) + 0.5);
      for (int64_t j = 0; j < from; ++j) {
        const double distance = std::abs(static_cast<double>(j) + 0.5 - centre) / reach;
        out.data_ptr<double>()[i * from + j] = std::max(0.0, 1 - distance);
      }
    }
    return out / out.sum(1, /*keepdim=*/true);
  };
  const at::Tensor pixels = image.to(at::kDouble);
  return at::matmul(at::matmul(weights(image.size(1), size), pixels), weights(image.size(2), size).t());
}

TEST(ImageTransform, ResizesWithoutAliasing) {
  at::manual_seed(1);
  for (const int64_t side : {7, 32, 100}) {  // larger, smaller and much smaller
    const at::Tensor image = at::randint(256, {3, side, side}, at::kByte);
    const ImageTransform transform(options(16, Crop::kNone, 3));
    const at::Tensor expected = resized(image, 16);
    EXPECT_LE((evaluate(transform, image).to(at::kDouble) * 255 - expected).abs().max().item<double>(), 1.01) << side;
    // In this layout, the channels of a pixel lie together, as decoders give them. The crop is part of a
    // larger picture.
    const at::Tensor together = image.permute({1, 2, 0}).contiguous().permute({2, 0, 1});
    EXPECT_LE((evaluate(transform, together).to(at::kDouble) * 255 - expected).abs().max().item<double>(), 1.01);
    const at::Tensor floats = evaluate(transform, image.to(at::kFloat));
    EXPECT_LE((floats.to(at::kDouble) - expected).abs().max().item<double>(), 1e-3) << side;
  }
}

TEST(ImageTransform, CutsOutAPartThenScalesIt) {
  const at::Tensor image = numbered(12, 20);
  ImageDraw draw;
  draw.top = 3;
  draw.left = 8;
  draw.height = 6;
  draw.width = 10;
  const at::Tensor part = image.narrow(1, 3, 6).narrow(2, 8, 10);
  const at::Tensor out = apply(ImageTransform(options(4)), image, draw);
  EXPECT_LE((out.to(at::kDouble) * 255 - resized(part, 4)).abs().max().item<double>(), 1.01);
}

TEST(ImageTransform, ShiftUncoversBlackAndFlipMirrors) {
  ImageOptions shape = options(3, Crop::kShift);
  shape.mean = {1.0 / 255};  // black becomes -1 / 255
  const ImageTransform transform(shape);
  const at::Tensor image = numbered(3, 3);
  ImageDraw draw = transform.draw(3, 3, 1, kEvaluation, 0);
  draw.down = 1;
  draw.right = -1;
  const at::Tensor expected =
      at::tensor({0.0F, 10.0F, 11.0F, 0.0F, 20.0F, 21.0F, 0.0F, 0.0F, 0.0F}).view({1, 3, 3}) - 1;
  EXPECT_TRUE(at::allclose(apply(transform, image, draw) * 255, expected, 1e-4, 1e-4));
  draw.flip = true;
  EXPECT_TRUE(at::allclose(apply(transform, image, draw) * 255, expected.flip({2}), 1e-4, 1e-4));
  draw.down = 5;  // outside the picture
  EXPECT_TRUE(at::allclose(apply(transform, image, draw) * 255, at::full({1, 3, 3}, -1.0F)));
  draw.down = 0;
  draw.right = -7;
  EXPECT_TRUE(at::allclose(apply(transform, image, draw) * 255, at::full({1, 3, 3}, -1.0F)));
  draw.right = 7;
  EXPECT_TRUE(at::allclose(apply(transform, image, draw) * 255, at::full({1, 3, 3}, -1.0F)));
}

bool same(const ImageDraw& a, const ImageDraw& b) {
  return a.top == b.top && a.left == b.left && a.height == b.height && a.width == b.width && a.down == b.down &&
         a.right == b.right && a.flip == b.flip;
}

TEST(ImageTransform, DrawsDependOnSeedEpochAndSampleAlone) {
  for (const Crop crop : {Crop::kShift, Crop::kResized}) {
    ImageOptions shape = options(8, crop);
    shape.flip = true;
    const ImageTransform transform(shape);
    int others = 0;
    for (int64_t sample = 0; sample < 50; ++sample) {
      const ImageDraw draw = transform.draw(40, 60, 7, 3, sample);
      EXPECT_TRUE(same(draw, transform.draw(40, 60, 7, 3, sample)));
      others += same(draw, transform.draw(40, 60, 8, 3, sample)) ? 1 : 0;
      others += same(draw, transform.draw(40, 60, 7, 4, sample)) ? 1 : 0;
      others += same(draw, transform.draw(40, 60, 7, 3, sample + 1)) ? 1 : 0;
      EXPECT_TRUE(same(transform.draw(40, 60, 7, kEvaluation, sample), transform.draw(40, 60, 9, kEvaluation, 0)));
    }
    EXPECT_LT(others, 10);
  }
}

TEST(ImageTransform, DrawsShiftsAndFlipsUniformly) {
  ImageOptions shape = options(28, Crop::kShift);
  shape.padding = 2;
  shape.flip = true;
  const ImageTransform transform(shape);
  std::map<std::pair<int64_t, int64_t>, int> shifts;
  int flips = 0;
  constexpr int kDraws = 5000;
  for (int64_t sample = 0; sample < kDraws; ++sample) {
    const ImageDraw draw = transform.draw(28, 28, 1, 0, sample);
    ++shifts[{draw.down, draw.right}];
    flips += draw.flip ? 1 : 0;
    EXPECT_EQ(draw.height, 28);
  }
  EXPECT_EQ(shifts.size(), 25U);
  for (const auto& [shift, count] : shifts) {
    EXPECT_NEAR(count, kDraws / 25, 80);
    EXPECT_LE(std::max(std::abs(shift.first), std::abs(shift.second)), 2);
  }
  EXPECT_NEAR(flips, kDraws / 2, 150);
}

TEST(ImageTransform, DrawsPartsWithTheAreasAndSidesOfInception) {
  const ImageTransform transform(options(224, Crop::kResized));
  double least = 1;
  double most = 0;
  double mean = 0;
  constexpr int kDraws = 4000;
  for (int64_t sample = 0; sample < kDraws; ++sample) {
    const ImageDraw draw = transform.draw(400, 500, 1, 0, sample);
    EXPECT_GE(draw.top, 0);
    EXPECT_GE(draw.left, 0);
    EXPECT_LE(draw.top + draw.height, 400);
    EXPECT_LE(draw.left + draw.width, 500);
    const double ratio = static_cast<double>(draw.width) / static_cast<double>(draw.height);
    EXPECT_GE(ratio, 0.74);
    EXPECT_LE(ratio, 1.35);
    const double area = static_cast<double>(draw.height * draw.width) / (400.0 * 500);
    least = std::min(least, area);
    most = std::max(most, area);
    mean += area / kDraws;
  }
  EXPECT_NEAR(least, 0.08, 0.01);
  EXPECT_GT(most, 0.9);
  // Areas lie between 0.08 and 1. The mean is lower, because some parts do not fit.
  EXPECT_NEAR(mean, 0.5, 0.06);
}

TEST(ImageTransform, AcceptsPicturesOfAnyShape) {
  for (const auto& [height, width] : {std::pair<int64_t, int64_t>{1, 1}, {1, 300}, {300, 1}, {2, 3}}) {
    for (const Crop crop : {Crop::kNone, Crop::kShift, Crop::kResized}) {
      const ImageTransform transform(options(4, crop));
      const at::Tensor image = at::full({1, height, width}, 255, at::kByte);
      for (const int64_t epoch : {kEvaluation, int64_t{0}, int64_t{1}}) {
        const at::Tensor out = apply(transform, image, transform.draw(height, width, 1, epoch, 5));
        EXPECT_LE(out.max().item<float>(), 1.0F);
        EXPECT_GE(out.min().item<float>(), crop == Crop::kShift ? 0.0F : 0.99F);
      }
    }
  }
}

TEST(ImageTransform, RefusesBadOptions) {
  const auto refuse = [](auto change, const std::vector<std::string>& parts) {
    ImageOptions shape = options(4, Crop::kNone, 3);
    change(shape);
    expect_error([&] { ImageTransform{shape}; }, parts);
  };
  refuse([](ImageOptions& o) { o.mean = {1, 2}; }, {"data.mean", "2 values", "3 channels"});
  refuse([](ImageOptions& o) { o.std = {1, 0, 1}; }, {"data.std", "above 0"});
  refuse([](ImageOptions& o) { o.std = {-1}; }, {"data.std", "above 0"});
  refuse([](ImageOptions& o) { o.mean = {std::nan("")}; }, {"data.mean", "finite"});
  refuse([](ImageOptions& o) { o.height = 0; }, {"data.image_size"});
  refuse([](ImageOptions& o) { o.padding = -1; }, {"data.padding"});
  refuse([](ImageOptions& o) { o.channels = 0; }, {"model.channels"});
  EXPECT_EQ(parse_crop("shift"), Crop::kShift);
  expect_error([] { parse_crop("resize"); }, {"data.crop", "resized"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
