#include "python/native/given.h"

#include <algorithm>
#include <string>
#include <string_view>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/data/array_dataset.h"
#include "twobp/files/safetensors.h"
#include "twobp/nn/layers/attention_inputs.h"

namespace twobp::python {
namespace {

constexpr const char* kMask = "attention_mask";

std::vector<std::string> names_of(const ModelInput& input) {
  switch (input.kind) {
    case InputKind::kTokens:
    case InputKind::kMaskedTokens: {
      std::vector<std::string> names = {"input_ids", "labels", kMask};
      if (input.token_types > 0) names.emplace_back("token_type_ids");
      if (input.documents) names.emplace_back(kDocumentStarts);
      return names;
    }
    case InputKind::kImages:
      return {"pixel_values", "labels"};
    case InputKind::kVectors:
      return {"input", "target"};
    case InputKind::kFields:
      break;
  }
  return {};
}

// Of the statistics that are variances, whose roots are taken.
constexpr std::string_view kVariances[] = {".exp_avg_sq", ".running_var"};

// A sparse or quantized tensor, or one of a subclass such as FakeTensor, has no memory that can be copied.
void check_kind(const std::string& name, const at::Tensor& tensor) {
  const bool plain = tensor.layout() == at::kStrided && !tensor.is_quantized() && !tensor.is_nested() &&
                     !tensor.is_meta() && !tensor.key_set().has(c10::DispatchKey::Python);
  TWOBP_CHECK(plain, "the state's ", name, " is no dense tensor with values (",
              tensor.key_set().has(c10::DispatchKey::Python) ? "a subclass that has its own operators"
                                                             : concat(tensor.layout(), ", ", tensor.device()),
              "): give a dense tensor on the CPU");
}

void check_type(const std::string& name, at::ScalarType given, at::ScalarType own) {
  const auto is_float = [](at::ScalarType type) {
    return type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16;
  };
  if (is_float(own)) {
    TWOBP_CHECK(is_float(given), "the state's ", name, " is ", given, ", but the trainer's is ", own,
                ": give a tensor of floating-point numbers of 16, 32 or 64 bits");
  } else {
    TWOBP_CHECK(given == own, "the state's ", name, " is ", given, ", but the trainer's is ", own);
  }
}

void check_values(const std::string& name, const at::Tensor& given, const at::Tensor& own) {
  if (only_finite(own)) {
    TWOBP_CHECK(only_finite(given), "the state's ", name,
                " has numbers that are not finite, so training could not continue");
    TWOBP_CHECK(given.scalar_type() == own.scalar_type() || only_finite(given.to(own.scalar_type())), "the state's ",
                name, " is ", given.scalar_type(), " and has numbers that overflow ", own.scalar_type(),
                ", which the trainer computes in");
  }
  for (const std::string_view variance : kVariances) {
    TWOBP_CHECK(!name.ends_with(variance) || given.numel() == 0 || !at::any(given < 0).item<bool>(), "the state's ",
                name, " has negative numbers, but holds variances");
  }
}

}  // namespace

void check_given(const Fields& fields, const ModelInput& input) {
  if (input.kind == InputKind::kFields) return;
  const std::vector<std::string> names = names_of(input);
  for (const auto& [name, tensor] : fields) {
    TWOBP_CHECK(std::find(names.begin(), names.end(), name) != names.end(), "the example has the field '", name,
                "', but the model (", input.type, ") reads only ", join(names, ", "),
                ": leave it out, or pass the model as a module");
  }
}

Fields as_read(Fields fields, const ModelInput& input) {
  if (input.kind != InputKind::kTokens && input.kind != InputKind::kMaskedTokens) return fields;
  if (const auto mask = fields.find(kMask); mask != fields.end() && mask->second.scalar_type() != at::kLong)
    mask->second = mask->second.ne(0).to(at::kLong);
  if (input.kind == InputKind::kMaskedTokens) return fields;
  return to_predicting_positions(std::move(fields));
}

void check_state(const std::vector<LiveTensor>& live, const Fields& state) {
  for (const auto& [name, tensor] : state) check_kind(name, tensor);
  for (const LiveTensor& one : live) {
    const auto found = state.find(one.name);
    TWOBP_CHECK(found != state.end(), "the state has no ", one.name);
    const at::Tensor& given = found->second;
    TWOBP_CHECK(given.sizes() == one.tensor.sizes(), one.name, " has shape ", given.sizes(), ", but the model's is ",
                one.tensor.sizes());
    check_type(one.name, given.scalar_type(), one.tensor.scalar_type());
    if (one.first) check_values(one.name, given, one.tensor);
  }
}

}  // namespace twobp::python
