#include "twobp/nn/layer.h"

#include <algorithm>

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>

#include "twobp/core/check.h"
#include "twobp/nn/context.h"
#include "twobp/nn/saved.h"
#include "twobp/nn/values.h"

namespace twobp {

void Layer::backward_p2(std::span<Saved* const>) {}
void Layer::collect_p2(Saved&, std::vector<P2Unit>&) {}
void Layer::collect_parameters(std::vector<Parameter*>&) {}

std::vector<Parameter*> parameters_of(Layer& layer) {
  std::vector<Parameter*> parameters;
  layer.collect_parameters(parameters);
  return parameters;
}

at::Tensor Saved::take_p1(size_t i) {
  TWOBP_CHECK(i < p1_.size() && p1_[i].defined(), "backward-p1 takes saved tensor ", i, " of ", p1_.size(),
              " (counted from 0) that forward kept until p1", i < p1_.size() ? ", a second time" : "",
              ": run forward first, and let it keep the tensor by keep_until_p1");
  return std::move(p1_[i]);
}

const at::Tensor& Saved::p2(size_t i) const {
  TWOBP_CHECK(i < p2_.size(), "backward-p2 asks for saved tensor ", i, " of ", p2_.size(),
              " (counted from 0) that were kept until p2: run forward and backward-p1 first, and let one of "
              "them keep the tensor by keep_until_p2");
  return p2_[i];
}

void Saved::keep_context(const Context& context) {
  context_ = std::make_shared<const Context>(context);
}

const Context& Saved::context() const {
  TWOBP_CHECK(context_ != nullptr,
              "a layer asks for the context of a micro-batch, but none was kept: run forward and backward-p1 first, "
              "and let one of them call keep_context");
  return *context_;
}

Saved& Saved::child(size_t i) {
  while (children_.size() <= i) {
    children_.push_back(std::make_unique<Saved>());
    if (previous_ != nullptr) children_.back()->follow(&previous_->child(children_.size() - 1));
  }
  return *children_[i];
}

void Saved::follow(Saved* previous) {
  previous_ = previous;
  for (size_t i = 0; i < children_.size(); ++i) {
    children_[i]->follow(previous == nullptr ? nullptr : &previous->child(i));
  }
}

void Saved::forget_slice() {
  to_later.clear();
  from_later.clear();
  for (auto& child : children_) child->forget_slice();
}

void Saved::release() {
  release_p1();
  release_p2();
  context_.reset();
  for (auto& child : children_) child->release();
}

namespace {

bool same_place(const at::Tensor& a, const at::Tensor& b) {
  return a.is_alias_of(b) && a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() &&
         a.strides() == b.strides();
}

}  // namespace

void Saved::round_p2() {
  Rounded rounded;
  round_p2(rounded);
}

void Saved::round_p2(Rounded& rounded) {
  rounded_.resize(p2_.size(), false);
  for (size_t i = 0; i < p2_.size(); ++i) {
    at::Tensor& tensor = p2_[i];
    // One with a graph is differentiated in W. One that is expanded takes less memory than its copy.
    if (rounded_[i] || !tensor.defined() || tensor.scalar_type() != at::kFloat || tensor.requires_grad()) continue;
    if (tensor.storage().nbytes() <= static_cast<size_t>(tensor.numel()) * sizeof(at::BFloat16)) continue;
    auto known = std::ranges::find_if(rounded, [&](const auto& one) { return same_place(one.first, tensor); });
    if (known == rounded.end()) known = rounded.insert(known, {tensor, tensor.to(at::kBFloat16)});
    tensor = known->second;
    rounded_[i] = true;
  }
  for (auto& child : children_) child->round_p2(rounded);
}

void Saved::widen_p2() {
  for (size_t i = 0; i < rounded_.size(); ++i) {
    if (rounded_[i]) p2_[i] = p2_[i].to(at::kFloat);
  }
  rounded_.clear();
  for (auto& child : children_) child->widen_p2();
}

at::Tensor pinned(const at::Tensor& tensor, at::DeviceType type) {
  c10::Allocator* const memory = at::globalContext().getPinnedMemoryAllocator(type);
  constexpr c10::DispatchKeySet kHost(c10::DispatchKey::CPU);
  const at::Tensor copy =
      tensor.is_non_overlapping_and_dense()
          ? at::detail::empty_strided_generic(tensor.sizes(), tensor.strides(), memory, kHost, tensor.scalar_type())
          : at::detail::empty_generic(tensor.sizes(), memory, kHost, tensor.scalar_type(), std::nullopt);
  return copy.copy_(tensor);
}

at::Tensor on_device(const at::Tensor& tensor, at::Device device) {
  if (tensor.device() == device) return tensor;
  const at::Tensor from = tensor.is_cpu() ? pinned(tensor, device.type()) : tensor;
  return from.to(from.options().device(device), /*non_blocking=*/true);
}

Sequential::Sequential(std::vector<std::unique_ptr<Layer>> layers) : layers_(std::move(layers)) {
  TWOBP_CHECK(!layers_.empty(), "Sequential needs at least one layer");
  for (size_t i = 0; i + 1 < layers_.size(); ++i) {
    if (layers_[i + 1]->takes_padded_rows()) layers_[i]->pad_rows();
  }
}

Values Sequential::forward(Values x, Context& context, Saved& saved) {
  for (size_t i = 0; i < layers_.size(); ++i) x = layers_[i]->forward(std::move(x), context, saved.child(i));
  return x;
}

Values Sequential::backward_p1(Values dy, Context& context, Saved& saved) {
  for (size_t i = layers_.size(); i-- > 0;) {
    dy = layers_[i]->backward_p1(std::move(dy), context, saved.child(i));
    saved.child(i).release_p1();
  }
  return dy;
}

void Sequential::collect_p2(Saved& saved, std::vector<P2Unit>& units) {
  for (size_t i = layers_.size(); i-- > 0;) layers_[i]->collect_p2(saved.child(i), units);
}

void Sequential::collect_parameters(std::vector<Parameter*>& parameters) {
  for (auto& layer : layers_) layer->collect_parameters(parameters);
}

}  // namespace twobp
