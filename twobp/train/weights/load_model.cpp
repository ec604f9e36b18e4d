#include <algorithm>
#include <set>
#include <string>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/files/safetensors.h"
#include "twobp/nn/layers/lora_linear.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/stage.h"
#include "twobp/schedule/schedule_source.h"
#include "twobp/train/weights/weight_files.h"

namespace twobp {
namespace {

constexpr size_t kMostTensors = 5;

// PyTorch's count of the batches that a norm has seen. It changes no result, and files of old versions lack
// it.
bool may_be_missing(const Parameter& parameter) {
  return parameter.is_buffer() && parameter.name().ends_with(".num_batches_tracked");
}

// Whether a tensor has one of the values, up to the rounding of its type.
bool has_one_of(const at::Tensor& tensor, const std::vector<at::Tensor>& values) {
  double rounding = 1e-5;  // two ways to compute in float32
  double least = 0;
  if (tensor.scalar_type() == at::kBFloat16) rounding = 0x1p-7;
  if (tensor.scalar_type() == at::kHalf) {
    rounding = 0x1p-10;
    least = 0x1p-24;
  }
  return std::any_of(values.begin(), values.end(), [&](const at::Tensor& value) {
    return value.numel() == tensor.numel() &&
           at::allclose(tensor.to(at::kDouble).reshape({-1}), value.to(at::kDouble).reshape({-1}), rounding, least);
  });
}

// The reason why a tensor that is no parameter cannot be skipped; "" if it can.
std::string objection_to(const std::string& name, const ModelWeights& weights) {
  const TensorNames& naming = weights.naming();
  if (naming.has_others || naming.unused.contains(name)) return "";
  if (const auto copy = naming.copies.find(name); copy != naming.copies.end()) {
    const std::string& original = copy->second;
    if (!weights.contains(original) || same_values(weights.tensor(name), weights.tensor(original))) return "";
    return concat(name, " differs from ", original,
                  ", but config.json ties them: remove the wrong one, or set tie_word_embeddings to false");
  }
  const auto values = naming.derived ? naming.derived(name) : std::vector<at::Tensor>();
  if (values.empty()) return name.substr(0, 100) + " is not known";
  if (has_one_of(weights.tensor(name), values)) return "";
  return concat(name.substr(0, 100),
                " has other values than those that follow from config.json: correct config.json, or remove it");
}

// Collects missing, misshaped, unknown and contradictory tensors for one message.
class Mismatch {
 public:
  explicit Mismatch(const ModelWeights& weights) : weights_(weights) {}

  void compare(const Parameter& parameter) {
    if (is_adapter(parameter.name())) return;
    std::vector<int64_t> shape = parameter.sizes();
    for (const ParameterPart& part : parameter.parts()) {
      if (!known_.insert(part.name).second) continue;  // a tied weight
      if (!shape.empty()) shape[0] = part.rows;
      if (!weights_.contains(part.name)) {
        if (weights_.may_lack(part.name)) {
          lacking_.push_back(part.name);
        } else if (!may_be_missing(parameter)) {
          add(part.name + " is missing");
        }
      } else if (weights_.shape(part.name) != shape) {
        add(concat(part.name, " is ", at::IntArrayRef(weights_.shape(part.name)), " instead of ",
                   at::IntArrayRef(shape)));
      }
    }
  }

  const std::vector<std::string>& lacking() const { return lacking_; }

  void throw_if_any() {
    for (const std::string& name : weights_.names()) {
      if (known_.contains(name)) continue;
      if (std::string objection = objection_to(name, weights_); !objection.empty()) add(std::move(objection));
    }
    if (count_ == 0) return;
    if (count_ > kMostTensors) found_.push_back(concat("and ", count_ - kMostTensors, " more"));
    fail(weights_.directory(),
         ": its tensors are not those of the model that its config.json describes: ", join(found_));
  }

 private:
  void add(std::string what) {
    if (++count_ <= kMostTensors) found_.push_back(std::move(what));
  }

  const ModelWeights& weights_;
  std::set<std::string> known_;
  std::vector<std::string> found_;
  std::vector<std::string> lacking_;
  size_t count_ = 0;
};

// `values` are those of the stored tensor, in the type of the computation or of the optimizer.
void check_finite(const at::Tensor& values, const std::string& name, const ModelWeights& weights) {
  if (only_finite(values)) return;
  const at::Tensor stored = weights.tensor(name);
  TWOBP_CHECK(only_finite(stored), weights.directory(), ": ", name,
              " has a value that is not finite (NaN or infinity): the model is damaged");
  fail(weights.directory(), ": ", name, " has a value of ", stored.abs().max().item<double>(), ", beyond the range of ",
       c10::toString(values.scalar_type()), ": compute in a wider type, such as bf16 or fp32");
}

void copy_weight(Parameter& parameter, const ModelWeights& weights) {
  if (is_adapter(parameter.name())) return;
  for (const auto& [name, rows] : parameter.parts_of(parameter.master)) {
    if (!weights.contains(name) && (may_be_missing(parameter) || weights.may_lack(name))) continue;
    const at::Tensor from = weights.tensor(name);
    const bool counts = !at::isFloatingType(rows.scalar_type());
    TWOBP_CHECK(at::isFloatingType(from.scalar_type()) != counts, weights.directory(), ": ", name, " is ",
                c10::toString(from.scalar_type()),
                counts ? ", not whole numbers" : ", a weight is F64, F32, F16 or BF16");
    rows.copy_(from);
    check_finite(rows, name, weights);
  }
  parameter.refresh_value();
  if (parameter.value.is_same(parameter.master)) return;
  for (const auto& [name, rows] : parameter.parts_of(parameter.value)) {
    if (weights.contains(name)) check_finite(rows, name, weights);
  }
}

}  // namespace

std::vector<std::string> check_weights(const ModelSpec& model, const ModelWeights& weights) {
  Mismatch mismatch(weights);
  for (const LayerSpec& spec : model.layers) {
    const auto layer = spec.make();  // allocates nothing
    for (const Parameter* parameter : parameters_of(*layer)) mismatch.compare(*parameter);
  }
  mismatch.throw_if_any();
  return mismatch.lacking();
}

std::vector<std::string> load_weights(Pipeline& pipeline, const ModelWeights& weights, const ModelSpec* whole) {
  std::vector<std::string> lacking = check_weights(whole != nullptr ? *whole : pipeline.model(), weights);
  pipeline.on_ranks([&](int rank) {
    for (int s = 0; s < pipeline.stages(); ++s) {
      if (pipeline.rank_of_stage()[s] != rank) continue;
      Stage& stage = pipeline.stage(s);
      for (int i = 0; i < stage.layer_count(); ++i) {
        for (Parameter* parameter : stage.parameters(i)) {
          if (!parameter->is_tied()) copy_weight(*parameter, weights);
        }
      }
    }
  });
  return lacking;
}

void load_weights(const std::vector<Parameter*>& parameters, const ModelWeights& weights) {
  Mismatch mismatch(weights);
  for (const Parameter* parameter : parameters) mismatch.compare(*parameter);
  mismatch.throw_if_any();
  for (Parameter* parameter : parameters) copy_weight(*parameter, weights);
}

}  // namespace twobp
