// Describes the current micro-batch to a layer, in addition to the layer's input.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include <ATen/ATen.h>

namespace twobp {

class DocumentPlaces;
class ExpertGroup;

// The batch's named tensors as the loader made them: `input_ids`, `labels`, masks, positions. They are on the host if
// layers read their contents there, and otherwise on the rank's device.
using Fields = std::map<std::string, at::Tensor>;

// The number of targets in a micro-batch that the loss counts.
using TargetCount = std::function<int64_t(const Fields& fields)>;

// The positions [begin, begin + length) of the fields, whose second dimension is the sequence. Views.
Fields slice_of(const Fields& fields, int64_t begin, int64_t length);

// A part of a micro-batch's sequences, if these are cut into slices (Schedule::slices): the positions [Context::past,
// Context::past + length). The fields of the Context are those of the slice.
struct Slice {
  const Fields* sequences = nullptr;  // the fields of the whole micro-batch; null: no slices
  int64_t positions = 0;              // of the whole sequences
  int64_t length = 0;
};

// A factor of the loss or of its gradient. It is a number, or, while a device records a step (StepGraph), a float64
// scalar on that device, which each replay reads anew. Both give the same bits.
class LossFactor {
 public:
  LossFactor(double number) : number_(number) {}
  explicit LossFactor(at::Tensor on_device) : on_device_(std::move(on_device)) {}

  // Throws Error while a device records: a replay would repeat the number.
  double number() const;
  // Undefined if it is a number.
  const at::Tensor& on_device() const { return on_device_; }
  // A scalar tensor of this type, on this device.
  at::Tensor scalar(at::ScalarType type, at::Device device) const;

  // Inline, so that only a LossFactor finds them.
  friend LossFactor operator*(const LossFactor& a, const LossFactor& b) { return a.times(b); }
  friend LossFactor operator/(const LossFactor& a, double b) { return a.over(b); }
  // Products have x's type. Those of 16-bit types are computed in float32.
  friend at::Tensor operator*(const at::Tensor& x, const LossFactor& factor) { return factor.of(x); }
  friend at::Tensor& operator*=(at::Tensor& x, const LossFactor& factor) { return factor.scale(x); }

 private:
  LossFactor times(const LossFactor& other) const;
  LossFactor over(double divisor) const;
  at::Tensor of(const at::Tensor& x) const;
  at::Tensor& scale(at::Tensor& x) const;

  double number_ = 1;
  at::Tensor on_device_;
};

struct Context {
  const Fields* fields = nullptr;
  // Where the layers of a rank keep the documents of the fields, which the first that needs them makes (documents.h).
  // Null: each layer makes them for itself.
  std::shared_ptr<const DocumentPlaces>* documents = nullptr;
  uint64_t seed = 0;
  int64_t step = 0;
  int64_t micro_batch = 0;  // index within the global step
  bool training = true;     // false: evaluation
  bool backward = true;     // false: no backward follows, because everything it would reach is frozen
  // Factor of the loss and its gradient: 1 / targets of the global batch.
  LossFactor loss_weight = 1;
  LossFactor loss_scale = 1;  // factor of the gradient alone; keeps small gradients in float16's range
  Slice slice{};
  int64_t past = 0;                // positions of the sequences in earlier slices
  ExpertGroup* experts = nullptr;  // the replicas that hold the layers' experts; null: this one, and nobody counts
  bool wants_logits = false;       // the loss layer returns the logits: for tests

  bool sliced() const { return slice.sequences != nullptr; }
  // Whether layers save what the backward pass needs.
  bool keeps() const { return training && backward; }

  // Returns the field. Throws Error that names a missing field.
  const at::Tensor& field(const std::string& name) const;
};

}  // namespace twobp
