#include "twobp/models/model_type.h"

#include <algorithm>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/models/bert.h"
#include "twobp/models/captured.h"
#include "twobp/models/decoder/decoder.h"
#include "twobp/models/mamba.h"
#include "twobp/models/mlp.h"
#include "twobp/models/resnet.h"

namespace twobp {

ModelOptions::ModelOptions() : ModelOptions("llama") {}

ModelOptions::ModelOptions(const std::string& type) : type_(&model_type(type)), options_(type_->defaults) {}

const std::string& ModelOptions::name() const {
  return type_->name;
}

SectionValues ModelOptions::chosen() {
  return {&type_->options, type_->values(options_)};
}

std::vector<const Section*> ModelOptions::alternatives() const {
  std::vector<const Section*> all;
  for (const ModelType& type : model_types()) all.push_back(&type.options);
  return all;
}

void ModelOptions::throw_other_type(const char* wanted) const {
  fail("the model is a ", type_->name, ", not a ", wanted);
}

const std::vector<ModelType>& model_types() {
  static const std::vector<ModelType> all = [] {
    std::vector<ModelType> types = decoder_types();
    for (const auto& make : {bert_type, mamba_type, resnet_type, mlp_type, captured_type}) types.push_back(make());
    return types;
  }();
  return all;
}

std::vector<std::string> model_type_names() {
  std::vector<std::string> names;
  for (const ModelType& one : model_types()) names.push_back(one.name);
  return names;
}

std::string hf_models() {
  std::vector<std::string> names;
  for (const ModelType& one : model_types()) {
    if (!one.hf_type.empty()) names.push_back(concat(one.hf_type, " (", one.hf_class, ")"));
  }
  return join(names);
}

const ModelType& model_type(const std::string& name) {
  const auto& all = model_types();
  const auto found = std::find_if(all.begin(), all.end(), [&](const auto& one) { return one.name == name; });
  TWOBP_CHECK(found != all.end(), "unknown model type '", name, "': there are ", join(model_type_names()));
  return *found;
}

}  // namespace twobp
