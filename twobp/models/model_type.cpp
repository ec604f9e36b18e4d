#include "twobp/models/model_type.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/models/captured.h"
#include "twobp/models/decoder/family.h"
#include "twobp/models/models.h"

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

namespace {

constexpr const char* kPadToken = "pad_token_id";

}  // namespace

int64_t read_pad_token(const CheckedJson& file, int64_t vocab, int64_t otherwise) {
  const nlohmann::json* value = file.find(kPadToken);
  if (value == nullptr) return file.object.contains(kPadToken) ? -1 : otherwise;
  TWOBP_CHECK(value->is_number_integer(), file.origin, ": ", kPadToken, " is ", shown(*value), ", not an integer");
  const bool fits = !value->is_number_unsigned() || value->get<uint64_t>() <= INT64_MAX;
  const int64_t token = fits ? value->get<int64_t>() : INT64_MAX;
  TWOBP_CHECK(token >= -vocab && token < vocab, file.origin, ": ", kPadToken, " ", shown(*value),
              " is outside the vocabulary of ", vocab,
              ", so transformers refuses the model: set it to the padding token, or to null");
  return token < 0 ? token + vocab : token;
}

void write_pad_token(int64_t pad_token, nlohmann::json& out) {
  if (out.contains(kPadToken)) return;
  out[kPadToken] = pad_token < 0 ? nlohmann::json() : nlohmann::json(pad_token);
}

void check_pad_token(int64_t pad_token, int64_t vocab) {
  TWOBP_CHECK(pad_token < vocab, "model.pad_token (", pad_token, ") is outside the vocabulary of ", vocab,
              ": set it to the padding token, or to -1 for none.");
}

}  // namespace twobp
