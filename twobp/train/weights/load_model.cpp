#include "twobp/train/weights/load_model.h"

#include <algorithm>
#include <set>
#include <string>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/nn/layers/lora_linear.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/stage.h"
#include "twobp/schedule/schedule_source.h"

namespace twobp {
namespace {

constexpr size_t kMostNamed = 5;

// PyTorch's count of the batches that a norm has seen. It changes no result, and files of old versions lack
// it.
bool may_be_missing(const Parameter& parameter) {
  return parameter.is_buffer() && parameter.name().ends_with(".num_batches_tracked");
}

// Collects missing, misshaped and unknown tensors for one message.
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
      const bool ignored =
          name.ends_with(".rotary_emb.inv_freq") || name == "lm_head.weight" || weights_.may_ignore(name);
      if (!ignored && !known_.contains(name)) add(name.substr(0, 100) + " is not known");
    }
    if (count_ == 0) return;
    if (count_ > kMostNamed) found_.push_back(concat("and ", count_ - kMostNamed, " more"));
    fail(weights_.directory(),
         ": its tensors are not those of the model that its config.json describes: ", join(found_));
  }

 private:
  void add(std::string what) {
    if (++count_ <= kMostNamed) found_.push_back(std::move(what));
  }

  const ModelWeights& weights_;
  std::set<std::string> known_;
  std::vector<std::string> found_;
  std::vector<std::string> lacking_;
  size_t count_ = 0;
};

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
  }
  parameter.refresh_value();
}

}  // namespace

std::vector<std::string> check_weights(const ModelSpec& model, const ModelWeights& weights) {
  Mismatch mismatch(weights);
  for (const LayerSpec& spec : model.layers) {
    const auto layer = spec.make();  // allocates nothing
    std::vector<Parameter*> parameters;
    layer->collect_parameters(parameters);
    for (const Parameter* parameter : parameters) mismatch.compare(*parameter);
  }
  mismatch.throw_if_any();
  return mismatch.lacking();
}

std::vector<std::string> load_weights(Pipeline& pipeline, const ModelWeights& weights) {
  std::vector<std::string> lacking = check_weights(pipeline.model(), weights);
  pipeline.on_ranks([&](int rank) {
    std::set<const void*> done;  // tied weights share their memory on a rank
    for (int s = 0; s < pipeline.stages(); ++s) {
      if (pipeline.rank_of_stage()[s] != rank) continue;
      Stage& stage = pipeline.stage(s);
      for (int i = 0; i < stage.layer_count(); ++i) {
        for (Parameter* parameter : stage.parameters(i)) {
          if (done.insert(parameter->master.const_data_ptr()).second) copy_weight(*parameter, weights);
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
