// A factor of the loss or of its gradient. It is a number, or, while a device records a step (StepGraph), a
// float64 scalar on that device, which each replay reads anew. Both give the same bits.
#pragma once

#include <utility>

#include <ATen/ATen.h>

namespace twobp {

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

}  // namespace twobp
