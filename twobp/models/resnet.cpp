#include <algorithm>
#include <cmath>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/models/hf_config.h"
#include "twobp/models/models.h"
#include "twobp/nn/layer.h"
#include "twobp/nn/layers/batch_norm.h"
#include "twobp/nn/layers/convolution.h"
#include "twobp/nn/layers/linear.h"
#include "twobp/nn/layers/losses.h"
#include "twobp/nn/layers/residual_block.h"

namespace twobp {
namespace {

using nlohmann::json;

// This key does not exist in Hugging Face's models: their stem is always 7 x 7 with stride 2 and pooling. transformers
// refuses weights of the other stem, because its kernel has another shape.
constexpr const char* kSmallImages = "small_images";

// the number of classes in transformers without id2label
constexpr int64_t kUsualClasses = 2;

// As in the paper: each stage is twice as wide as the previous one.
ResnetOptions filled_in(ResnetOptions config) {
  if (!config.widths.empty()) return config;
  int width = config.block == "bottleneck" ? 256 : 64;
  for (size_t i = 0; i < config.depths.size(); ++i, width *= 2) config.widths.push_back(width);
  return config;
}

struct Resnet : ResnetOptions {
  at::ScalarType dtype;

  bool bottleneck() const { return block == "bottleneck"; }
};

void check_resnet(const ResnetOptions& given) {
  ResnetOptions config = given;
  TWOBP_CHECK(!config.depths.empty() && config.depths.size() <= 16,
              "model.depths needs the number of blocks of each stage, of 1 to 16 stages.");
  config = filled_in(config);
  TWOBP_CHECK(config.widths.size() == config.depths.size(), "model.widths has ", config.widths.size(),
              " numbers and model.depths ", config.depths.size(), ": both have one for each stage.");
  for (const int depth : config.depths) {
    TWOBP_CHECK(depth >= 1 && depth <= 4096, "model.depths: a stage of ", depth, " blocks, but it has 1 to 4096.");
  }
  for (const int width : config.widths) {
    TWOBP_CHECK(width >= 1 && width <= 1 << 16, "model.widths: a stage of ", width,
                " channels, but it has 1 to 65536.");
    TWOBP_CHECK(config.block != "bottleneck" || width % 4 == 0, "model.widths: ", width,
                " is not a multiple of 4, as it must be for model.block \"bottleneck\", which narrows to a "
                "quarter.");
  }
}

std::unique_ptr<Layer> stem(const Resnet& o) {
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

// The deviation of PyTorch's uniform numbers for a Linear is 1 / sqrt(3 in). The bias starts at 0.
std::unique_ptr<Layer> head(const Resnet& o) {
  const int64_t width = o.widths.back();
  return make_sequential(
      std::make_unique<AveragePool2d>(),
      std::make_unique<Linear>(std::vector<ParameterPart>{{"classifier.1.weight", o.classes}}, width,
                               1 / std::sqrt(3.0 * static_cast<double>(width)), o.dtype, /*bias=*/true),
      std::make_unique<CrossEntropy>());
}

void check(const Resnet& o) {
  TWOBP_CHECK(!o.widths.empty() && o.widths.size() == o.depths.size(), "a ResNet has a width and a depth for each ",
              "stage, at least one: there are ", o.widths.size(), " widths and ", o.depths.size(), " depths");
  const auto positive = [](int64_t n) { return n >= 1; };
  TWOBP_CHECK(std::all_of(o.widths.begin(), o.widths.end(), positive) &&
                  std::all_of(o.depths.begin(), o.depths.end(), positive) && o.stem >= 1 && o.classes >= 1 &&
                  o.channels >= 1,
              "a ResNet needs widths, depths, stem, classes and channels of at least 1");
  for (const int64_t width : o.widths) {
    TWOBP_CHECK(!o.bottleneck() || width % 4 == 0, "the width ", width,
                " of a stage of bottlenecks is not a multiple of 4");
  }
}

int64_t classes_of(const CheckedJson& file) {
  const json* labels = file.find("id2label");
  TWOBP_CHECK(labels == nullptr || labels->is_object(), file.origin, ": id2label is ", shown(*labels),
              ", not an object");
  return file.integer("num_labels", labels ? static_cast<int64_t>(labels->size()) : kUsualClasses);
}

void read_resnet(const CheckedJson& file, ResnetOptions& config) {
  for (const char* key : {"downsample_in_first_stage", "downsample_in_bottleneck"}) file.require_false(key);
  const std::string activation = file.text("hidden_act", "relu");
  TWOBP_CHECK(activation == "relu", file.origin, ": hidden_act ", shown(activation), " is not supported: \"relu\" is");
  const std::string block = file.text("layer_type", "bottleneck");
  TWOBP_CHECK(block == "bottleneck" || block == "basic", file.origin, ": layer_type ", shown(block),
              " is not supported: \"bottleneck\" and \"basic\" are");
  // The defaults of transformers for missing keys, for every block.
  const ResnetOptions defaults;
  config.block = block;
  config.stem = file.integer("embedding_size", 64);
  config.widths = file.find("hidden_sizes") ? file.integers("hidden_sizes") : std::vector{256, 512, 1024, 2048};
  config.depths = file.find("depths") ? file.integers("depths") : defaults.depths;
  config.channels = file.integer("num_channels", 3);
  config.classes = classes_of(file);
  config.small_images = file.boolean(kSmallImages, false);
  try {
    check_resnet(config);
  } catch (const Error& error) {
    fail(file.origin, ": ", error.what());
  }
}

void write_resnet(const ResnetOptions& given, json& out) {
  const ResnetOptions config = filled_in(given);
  const auto labels = out.find("id2label");
  if (labels == out.end() || !labels->is_object() || static_cast<int64_t>(labels->size()) != config.classes) {
    std::vector<std::string> names;
    for (int64_t i = 0; i < config.classes; ++i) names.push_back(concat("LABEL_", i));
    name_classes(out, names);
  }
  out.erase("num_labels");  // a synonym
  out.update({{"num_channels", config.channels},
              {"embedding_size", config.stem},
              {"hidden_sizes", config.widths},
              {"depths", config.depths},
              {"layer_type", config.block},
              {"hidden_act", "relu"},
              {"downsample_in_first_stage", false},
              {"downsample_in_bottleneck", false}});
  out.erase(kSmallImages);
  if (config.small_images) out[kSmallImages] = true;
}

// Translates the names of torchvision ("conv1.weight", "bn1.bias", "layer2.0.conv3.weight",
// "layer2.0.downsample.1.running_mean", "fc.bias"), and those of a ResNetModel, which has no classifier.
std::string rename_resnet(const std::string& stored) {
  static const Pattern stem_norm("bn1\\.([A-Za-z0-9_]+)");
  static const Pattern in_block("layer([0-9]{1,3})\\.([0-9]+)\\.(conv|bn)([0-9])\\.([A-Za-z0-9_]+)");
  static const Pattern shortcut("layer([0-9]{1,3})\\.([0-9]+)\\.downsample\\.([01])\\.([A-Za-z0-9_]+)");
  const auto block = [](const std::vector<std::string>& found) {
    return concat("resnet.encoder.stages.", std::stol(found[1]) - 1, ".layers.", found[2]);
  };
  if (stored.size() > 200) return stored;
  if (stored == "conv1.weight") return "resnet.embedder.embedder.convolution.weight";
  if (stored.starts_with("fc.")) return "classifier.1." + stored.substr(3);
  if (stored.starts_with("embedder.") || stored.starts_with("encoder.")) return "resnet." + stored;
  if (const auto found = stem_norm.match(stored); !found.empty()) {
    return "resnet.embedder.embedder.normalization." + found[1];
  }
  if (const auto found = in_block.match(stored); !found.empty()) {
    return concat(block(found), ".layer.", std::stol(found[4]) - 1,
                  found[3] == "conv" ? ".convolution." : ".normalization.", found[5]);
  }
  if (const auto found = shortcut.match(stored); !found.empty()) {
    return concat(block(found), found[3] == "0" ? ".shortcut.convolution." : ".shortcut.normalization.", found[4]);
  }
  return stored;
}

bool may_lack_of_resnet(const std::string& parameter) {
  return parameter.starts_with("classifier.");
}

std::vector<Key> resnet_keys() {
  using O = ResnetOptions;
  return {
      TWOBP_KEY(O, classes, "kinds of pictures to distinguish").in("classes").from(2, kMaxWidth),
      TWOBP_KEY(O, channels, "channels of a picture").in("channels").from(1, kMaxCount),
      TWOBP_KEY(O, stem, "output channels of the first convolution").in("channels").from(1, kMaxCount),
      TWOBP_KEY(O, small_images,
                "the first convolution is 3 x 3 with stride 1 and without pooling, for images of 28 or 32 pixels"),
      TWOBP_KEY(O, block, "bottleneck: three convolutions, one of them 3 x 3; basic: two of 3 x 3")
          .one_of({"bottleneck", "basic"}),
      TWOBP_KEY(O, depths, "blocks of each stage; every stage but the first halves height and width").in("blocks"),
      TWOBP_KEY(O, widths, "output channels of each stage; []: 64, 128, 256, 512, for bottlenecks 4 times as many")
          .in("channels"),
  };
}

}  // namespace

ModelSpec resnet(const ResnetOptions& options, const BuildSettings& settings) {
  const Resnet o{filled_in(options), settings.dtype};
  check(o);
  ModelSpec model;
  model.input_field = "pixel_values";
  model.layers.push_back({"resnet.embedder", "stem", [o] { return stem(o); }});
  int64_t in = o.stem;
  for (size_t stage = 0; stage < o.widths.size(); ++stage) {
    for (int64_t i = 0; i < o.depths[stage]; ++i) {
      const std::string name = "resnet.encoder.stages." + std::to_string(stage) + ".layers." + std::to_string(i);
      const ResidualBlockOptions block{in, o.widths[stage], stage > 0 && i == 0 ? 2 : 1, o.bottleneck()};
      // Blocks of one shape have equal costs. Each kind takes the output of the previous one.
      const std::string kind = concat("stage ", stage, i == 0 ? " first block" : " block");
      model.layers.push_back(
          {name, kind, [block, name, o] { return std::make_unique<ResidualBlock>(name, block, o.dtype); }});
      in = o.widths[stage];
    }
  }
  model.layers.push_back({"classifier", "head", [o] { return head(o); }});
  return model;
}

ModelType resnet_type() {
  ModelType type = make_model_type<ResnetOptions>(resnet_keys());
  type.hf_type = "resnet";
  type.hf_class = "ResNetForImageClassification";
  type.hf_others = {"ResNetModel"};
  type.names = [](const ModelOptions&) {
    TensorNames names;
    names.rename = rename_resnet;
    names.may_lack = may_lack_of_resnet;
    return names;
  };
  type.reduced_precision = true;
  type.input = [](const ModelOptions& o) {
    ModelInput input;
    input.kind = InputKind::kImages;
    input.channels = o.as<ResnetOptions>().channels;
    input.classes = o.as<ResnetOptions>().classes;
    return input;
  };
  type.fill_in = [](ModelOptions& o) { o.as<ResnetOptions>() = filled_in(o.as<ResnetOptions>()); };
  type.check = [](const ModelOptions& o) { check_resnet(o.as<ResnetOptions>()); };
  type.build = [](const ModelOptions& o, const BuildSettings& s) { return resnet(o.as<ResnetOptions>(), s); };
  type.read_hf = [](const CheckedJson& file, ModelOptions& o) { read_resnet(file, o.as<ResnetOptions>()); };
  type.write_hf = [](const ModelOptions& o, int64_t /*sequence*/, json& out) {
    write_resnet(o.as<ResnetOptions>(), out);
  };
  return type;
}

}  // namespace twobp
