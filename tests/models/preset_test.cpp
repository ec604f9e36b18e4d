// Tests configs/presets: the number of trained parameters of the paper's four models, and splits that fit.
#include <numeric>
#include <set>

#include "tests/train/helpers.h"
#include "twobp/models/model.h"
#include "twobp/train/build_model.h"

namespace twobp::TWOBP_FILE {
namespace {

struct Preset {
  const char* file;
  int64_t parameters;
};

class PresetTest : public testing::TestWithParam<Preset> {};

TEST_P(PresetTest, IsTheModelOfThePaper) {
  const Config config =
      load_config(std::string(TWOBP_SOURCE_DIR) + "/configs/presets/" + GetParam().file + ".json", {});
  const ModelSpec model = build_model(config.model);  // this allocates nothing
  std::set<std::string> counted;                      // tied weights count once
  int64_t numbers = 0;
  for (const LayerSpec& spec : model.layers) {
    const auto layer = spec.make();
    std::vector<Parameter*> parameters;
    layer->collect_parameters(parameters);
    for (const Parameter* parameter : parameters) {
      if (parameter->trainable() && counted.insert(parameter->name()).second) numbers += parameter->numel();
    }
  }
  EXPECT_EQ(numbers, GetParam().parameters);
  EXPECT_EQ(pipeline_shape(config.pipeline).stages, 4);
  const auto& split = config.pipeline.split;
  if (!split.empty()) {
    EXPECT_EQ(std::accumulate(split.begin(), split.end(), 0), static_cast<int>(model.layers.size()));
  }
}

// The authors or transformers give these parameter counts: LLaMa-7B (arXiv 2302.13971), BERT-Large (arXiv 1810.04805),
// Mamba-1.4b (arXiv 2312.00752) and ResNet-152 (arXiv 1512.03385).
INSTANTIATE_TEST_SUITE_P(Presets, PresetTest,
                         testing::Values(Preset{"transformer_7b", 6738415616}, Preset{"bert_large", 335174458},
                                         Preset{"mamba_1.4b", 1372178432}, Preset{"resnet_152", 60192808}),
                         [](const auto& info) {
                           std::string name = info.param.file;
                           for (char& c : name) c = c == '.' ? '_' : c;
                           return name;
                         });

}  // namespace
}  // namespace twobp::TWOBP_FILE
