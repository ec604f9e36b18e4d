#include "twobp/models/resnet.h"

#include <algorithm>
#include <cmath>

#include "twobp/core/check.h"
#include "twobp/nn/layers/batch_norm.h"
#include "twobp/nn/layers/conv2d.h"
#include "twobp/nn/layers/cross_entropy.h"
#include "twobp/nn/layers/linear.h"
#include "twobp/nn/layers/pool2d.h"
#include "twobp/nn/layers/residual_block.h"
#include "twobp/nn/layers/sequential.h"

namespace twobp {
namespace {

std::unique_ptr<Layer> stem(const ResnetOptions& o) {
  const std::string name = "resnet.embedder.embedder.";
  const ConvolutionOptions convolution = o.small_images ? ConvolutionOptions{o.channels, o.stem, 3, 1, 1}
                                                        : ConvolutionOptions{o.channels, o.stem, 7, 2, 3};
  std::vector<std::unique_ptr<Layer>> layers;
  layers.push_back(std::make_unique<ImageInput>(o.channels, o.dtype));
  layers.push_back(std::make_unique<Conv2d>(name + "convolution.weight", convolution, o.dtype,
                                            /*gives_gradient=*/false));
  layers.push_back(std::make_unique<BatchNorm2d>(name + "normalization", o.stem, /*relu=*/true, o.dtype));
  if (!o.small_images) layers.push_back(std::make_unique<MaxPool2d>(3, 2, 1));
  return std::make_unique<Sequential>(std::move(layers));
}

// The deviation of PyTorch's uniform numbers for a Linear: 1 / sqrt(3 in). The bias begins at 0.
std::unique_ptr<Layer> head(const ResnetOptions& o) {
  const int64_t width = o.widths.back();
  return make_sequential(
      std::make_unique<AveragePool2d>(),
      std::make_unique<Linear>(std::vector<ParameterPart>{{"classifier.1.weight", o.classes}}, width,
                               1 / std::sqrt(3.0 * static_cast<double>(width)), o.dtype, /*bias=*/true),
      std::make_unique<CrossEntropy>());
}

void check(const ResnetOptions& o) {
  TWOBP_CHECK(!o.widths.empty() && o.widths.size() == o.depths.size(),
              "a ResNet has a width and a depth for each ", "stage, at least one: there are ",
              o.widths.size(), " widths and ", o.depths.size(), " depths");
  const auto positive = [](int64_t n) { return n >= 1; };
  TWOBP_CHECK(std::all_of(o.widths.begin(), o.widths.end(), positive) &&
                  std::all_of(o.depths.begin(), o.depths.end(), positive) && o.stem >= 1 && o.classes >= 1 &&
                  o.channels >= 1,
              "a ResNet needs widths, depths, stem, classes and channels of at least 1");
  for (const int64_t width : o.widths) {
    TWOBP_CHECK(!o.bottleneck || width % 4 == 0, "the width ", width,
                " of a stage of bottlenecks is not a multiple of 4");
  }
}

}  // namespace

ModelSpec resnet(const ResnetOptions& o) {
  check(o);
  ModelSpec model;
  model.input_field = "pixel_values";
  model.layers.push_back({"resnet.embedder", "stem", [o] { return stem(o); }});
  int64_t in = o.stem;
  for (size_t stage = 0; stage < o.widths.size(); ++stage) {
    for (int64_t i = 0; i < o.depths[stage]; ++i) {
      const std::string name =
          "resnet.encoder.stages." + std::to_string(stage) + ".layers." + std::to_string(i);
      const ResidualBlockOptions block{in, o.widths[stage], stage > 0 && i == 0 ? 2 : 1, o.bottleneck};
      // Blocks of one shape cost the same. Each kind takes what the one before it gives.
      const std::string kind = concat("stage ", stage, i == 0 ? " first block" : " block");
      model.layers.push_back(
          {name, kind, [block, name, o] { return std::make_unique<ResidualBlock>(name, block, o.dtype); }});
      in = o.widths[stage];
    }
  }
  model.layers.push_back({"classifier", "head", [o] { return head(o); }});
  return model;
}

}  // namespace twobp
