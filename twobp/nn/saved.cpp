#include "twobp/nn/saved.h"

#include "twobp/core/check.h"
#include "twobp/nn/context.h"

namespace twobp {

at::Tensor Saved::take_p1(size_t i) {
  TWOBP_CHECK(i < p1_.size() && p1_[i].defined(), "backward-p1 asks for saved tensor ", i,
              ", which does not exist: was forward run for this micro-batch?");
  return std::move(p1_[i]);
}

const at::Tensor& Saved::p2(size_t i) const {
  TWOBP_CHECK(i < p2_.size(), "backward-p2 asks for saved tensor ", i, " of ", p2_.size(),
              ": were forward and backward-p1 run for this micro-batch?");
  return p2_[i];
}

void Saved::keep_context(const Context& context) {
  context_ = std::make_shared<const Context>(context);
}

const Context& Saved::context() const {
  TWOBP_CHECK(
      context_ != nullptr,
      "a layer asks for the context of a micro-batch, but none was kept: were forward and backward-p1 "
      "run for it?");
  return *context_;
}

Saved& Saved::child(size_t i) {
  while (children_.size() <= i) children_.push_back(std::make_unique<Saved>());
  return *children_[i];
}

void Saved::release() {
  release_p1();
  release_p2();
  context_.reset();
  for (auto& child : children_) child->release();
}

}  // namespace twobp
