#include "twobp/nn/context.h"

#include <vector>

#include <ATen/ScalarOps.h>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/nn/kernels/products/rows.h"

namespace twobp {

Fields slice_of(const Fields& fields, int64_t begin, int64_t length) {
  Fields part;
  for (const auto& [name, field] : fields) {
    TWOBP_CHECK(field.dim() >= 2 && field.size(1) >= begin + length, "the field \"", name, "\" of sizes ",
                field.sizes(), " has no positions ", begin, " to ", begin + length - 1, " for a slice");
    part.emplace(name, field.narrow(1, begin, length));
  }
  return part;
}

const at::Tensor& Context::field(const std::string& name) const {
  TWOBP_CHECK(fields != nullptr, "the batch has no fields, but a layer needs \"", name, "\".");
  const auto found = fields->find(name);
  if (found != fields->end()) return found->second;
  std::vector<std::string> present;
  for (const auto& [key, tensor] : *fields) present.push_back(key);
  fail("the batch has no field \"", name, "\", which a layer needs; it has ", present.empty() ? "none" : join(present),
       ".");
}

double LossFactor::number() const {
  TWOBP_CHECK(!on_device_.defined(),
              "the loss reads its factor on the host, so the step cannot be recorded as a graph: set "
              "pipeline.graphs to false");
  return number_;
}

at::Tensor LossFactor::scalar(at::ScalarType type, at::Device device) const {
  return on_device_.defined() ? on_device_.to(type)
                              : at::scalar_tensor(number_, at::TensorOptions().dtype(type).device(device));
}

LossFactor LossFactor::times(const LossFactor& other) const {
  if (!on_device_.defined() && !other.on_device_.defined()) return number_ * other.number_;
  if (!on_device_.defined()) return other.times(*this);
  return LossFactor(other.on_device_.defined() ? on_device_ * other.on_device_ : on_device_ * other.number_);
}

LossFactor LossFactor::over(double divisor) const {
  if (!on_device_.defined()) return number_ / divisor;
  // By a number, a GPU would multiply by its inverse.
  return LossFactor(on_device_ / at::scalar_tensor(divisor, on_device_.options()));
}

// The factor is not rounded to 16 bits.
at::Tensor LossFactor::of(const at::Tensor& x) const {
  if (!on_device_.defined()) return x * number_;
  const at::ScalarType type = compute_type(x.scalar_type());
  return (x.to(type) * on_device_.to(type)).to(x.scalar_type());
}

at::Tensor& LossFactor::scale(at::Tensor& x) const {
  // On a CPU, mul_ by a number would round the number to 16 bits.
  if (!on_device_.defined()) return at::mul_out(x, x, at::native::wrapped_scalar_tensor(number_));
  const at::ScalarType type = compute_type(x.scalar_type());
  return x.copy_(x.to(type).mul_(on_device_.to(type)));
}

}  // namespace twobp
