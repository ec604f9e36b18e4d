// ResNet: ResNetForImageClassification of transformers, and torchvision's names for the same tensors.
#include "twobp/models/resnet.h"

#include <algorithm>
#include <regex>

#include "twobp/core/check.h"
#include "twobp/models/types/all.h"

namespace twobp {
namespace {

using nlohmann::json;

// Not one of Hugging Face's: its stem is always 7 x 7 with stride 2 and pooling. transformers refuses the
// weights of the other one, whose kernel has another shape.
constexpr const char* kSmallImages = "small_images";

// transformers' number of classes without id2label.
constexpr int64_t kUsualClasses = 2;

// As in the paper: each stage is twice as wide as the one before it.
void fill_in(ModelConfig& config) {
  if (!config.widths.empty()) return;
  int width = config.block == "bottleneck" ? 256 : 64;
  for (size_t i = 0; i < config.depths.size(); ++i, width *= 2) config.widths.push_back(width);
}

void check(const ModelConfig& given) {
  ModelConfig config = given;
  TWOBP_CHECK(!config.depths.empty() && config.depths.size() <= 16,
              "model.depths needs the number of blocks of each stage, of 1 to 16 stages.");
  fill_in(config);
  TWOBP_CHECK(config.widths.size() == config.depths.size(), "model.widths has ", config.widths.size(),
              " numbers and model.depths ", config.depths.size(), ": both have one for each stage.");
  for (const int depth : config.depths) {
    TWOBP_CHECK(depth >= 1 && depth <= 4096, "model.depths: a stage of ", depth,
                " blocks, but it has 1 to 4096.");
  }
  for (const int width : config.widths) {
    TWOBP_CHECK(width >= 1 && width <= 1 << 16, "model.widths: a stage of ", width,
                " channels, but it has 1 to 65536.");
    TWOBP_CHECK(config.block != "bottleneck" || width % 4 == 0, "model.widths: ", width,
                " is not a multiple of 4, as it must be for model.block \"bottleneck\", which narrows to a "
                "quarter.");
  }
}

ModelSpec build(const ModelConfig& given, at::ScalarType dtype) {
  ModelConfig config = given;
  fill_in(config);
  ResnetOptions options;
  options.channels = config.channels;
  options.classes = config.classes;
  options.stem = config.stem;
  options.small_images = config.small_images;
  options.widths.assign(config.widths.begin(), config.widths.end());
  options.depths.assign(config.depths.begin(), config.depths.end());
  options.bottleneck = config.block == "bottleneck";
  options.dtype = dtype;
  return resnet(options);
}

int64_t classes_of(const HfSection& file) {
  const json* labels = file.find("id2label");
  TWOBP_CHECK(labels == nullptr || labels->is_object(), file.origin, ": id2label is ", shown(*labels),
              ", not an object");
  return file.integer("num_labels", labels ? static_cast<int64_t>(labels->size()) : kUsualClasses);
}

void read_hf(const HfSection& file, ModelConfig& config) {
  for (const char* key : {"downsample_in_first_stage", "downsample_in_bottleneck"}) file.require_false(key);
  const std::string activation = file.text("hidden_act", "relu");
  TWOBP_CHECK(activation == "relu", file.origin, ": hidden_act ", shown(activation),
              " is not supported: \"relu\" is");
  const std::string block = file.text("layer_type", "bottleneck");
  TWOBP_CHECK(block == "bottleneck" || block == "basic", file.origin, ": layer_type ", shown(block),
              " is not supported: \"bottleneck\" and \"basic\" are");
  // What transformers takes where a key is missing, whatever the block.
  const ModelConfig defaults;
  config.block = block;
  config.stem = file.integer("embedding_size", 64);
  config.widths =
      file.find("hidden_sizes") ? file.integers("hidden_sizes") : std::vector{256, 512, 1024, 2048};
  config.depths = file.find("depths") ? file.integers("depths") : defaults.depths;
  config.channels = file.integer("num_channels", 3);
  config.classes = classes_of(file);
  config.small_images = file.boolean(kSmallImages, false);
  try {
    check(config);
  } catch (const Error& error) {
    fail(file.origin, ": ", error.what());
  }
}

void write_hf(const ModelConfig& given, int64_t, json& out) {
  ModelConfig config = given;
  fill_in(config);
  const auto labels = out.find("id2label");
  if (labels == out.end() || !labels->is_object() || static_cast<int64_t>(labels->size()) != config.classes) {
    json names = json::object();
    json numbers = json::object();
    for (int64_t i = 0; i < config.classes; ++i) {
      const std::string name = concat("LABEL_", i);
      names[std::to_string(i)] = name;
      numbers[name] = i;
    }
    out["id2label"] = names;
    out["label2id"] = numbers;
  }
  out.erase("num_labels");  // the other way to say the same
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

// "conv1.weight", "bn1.bias", "layer2.0.conv3.weight", "layer2.0.downsample.1.running_mean", "fc.bias" of
// torchvision, and the names of a ResNetModel, which has no classifier.
std::string rename(const std::string& stored) {
  static const std::regex stem_norm("bn1\\.(\\w+)");
  static const std::regex in_block("layer(\\d+)\\.(\\d+)\\.(conv|bn)(\\d)\\.(\\w+)");
  static const std::regex shortcut("layer(\\d+)\\.(\\d+)\\.downsample\\.([01])\\.(\\w+)");
  std::smatch found;
  const auto block = [&] {
    return concat("resnet.encoder.stages.", std::stol(found[1]) - 1, ".layers.", found[2].str());
  };
  if (stored.size() > 200) return stored;
  if (stored == "conv1.weight") return "resnet.embedder.embedder.convolution.weight";
  if (stored.starts_with("fc.")) return "classifier.1." + stored.substr(3);
  if (stored.starts_with("embedder.") || stored.starts_with("encoder.")) return "resnet." + stored;
  if (std::regex_match(stored, found, stem_norm)) {
    return "resnet.embedder.embedder.normalization." + found[1].str();
  }
  if (std::regex_match(stored, found, in_block) && found[1].length() < 4) {
    return concat(block(), ".layer.", std::stol(found[4]) - 1,
                  found[3] == "conv" ? ".convolution." : ".normalization.", found[5].str());
  }
  if (std::regex_match(stored, found, shortcut) && found[1].length() < 4) {
    return concat(block(), found[3] == "0" ? ".shortcut.convolution." : ".shortcut.normalization.",
                  found[4].str());
  }
  return stored;
}

bool may_lack(const std::string& parameter) {
  return parameter.starts_with("classifier.");
}

}  // namespace

Architecture resnet_architecture() {
  Architecture resnet;
  resnet.type = "resnet";
  resnet.input = ModelInput::kImages;
  resnet.hf_type = "resnet";
  resnet.hf_class = "ResNetForImageClassification";
  resnet.hf_others = {"ResNetModel"};
  resnet.names.rename = rename;
  resnet.names.may_lack = may_lack;
  resnet.reduced_precision = true;
  resnet.fill_in = fill_in;
  resnet.check = check;
  resnet.build = build;
  resnet.read_hf = read_hf;
  resnet.write_hf = write_hf;
  return resnet;
}

}  // namespace twobp
