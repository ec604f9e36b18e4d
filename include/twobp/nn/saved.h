// The tensors that a layer keeps for one micro-batch. Each is marked as needed until backward-p1 or until backward-p2.
// They are released as early as possible: `take_p1` moves a tensor out for good.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "twobp/nn/values.h"

namespace twobp {

struct Context;

class Saved {
 public:
  void keep_until_p1(at::Tensor tensor) { p1_.push_back(std::move(tensor)); }
  void keep_until_p2(at::Tensor tensor) { p2_.push_back(std::move(tensor)); }

  // Moves the i-th until-p1 tensor out, in the order kept. Throws if it does not exist (backward without forward).
  at::Tensor take_p1(size_t i);
  // The i-th until-p2 tensor, in the order kept.
  const at::Tensor& p2(size_t i) const;
  size_t p1_count() const { return p1_.size(); }
  size_t p2_count() const { return p2_.size(); }

  // The part of the i-th child of a container.
  Saved& child(size_t i);

  // The micro-batch's context, for a layer that repeats earlier work. Its fields live until the end of the step. Throws
  // if no context was kept.
  void keep_context(const Context& context);
  void keep_context(const Saved& other) { context_ = other.context_; }
  const Context& context() const;
  bool has_context() const { return context_ != nullptr; }

  // Tensors that pass between the slices of a sequence (Context::slice), each of which has its own Saved. F puts into
  // `to_later` the tensors that the F and I of later slices read. I of later slices adds to `from_later`, a gradient
  // that this slice's I takes over. Both survive release(). The layer drops them in I, or forget_slice() does if no I
  // follows.
  Values to_later;
  Values from_later;
  // The same layer's Saved of the slice before this one; null for the first.
  Saved* previous() const { return previous_; }
  // Sets it, for the children too.
  void follow(Saved* previous);
  // Drops the tensors that pass between slices, also those of the children.
  void forget_slice();

  void release_p1() { p1_.clear(); }
  void release_p2() {
    p2_.clear();
    rounded_.clear();
  }
  // Drops everything, including the children's tensors.
  void release();

  // After I: rounds the float32 tensors that only W still reads to bfloat16, here and in the children. One that is kept
  // several times stays one. Before W, widen_p2() gives them back as float32.
  void round_p2();
  void widen_p2();

  // Calls visit(tensor) for the tensors that are kept until p2, here and in the children.
  template <typename Visit>
  void visit_p2(Visit&& visit) const {
    for (const auto& tensor : p2_) visit(tensor);
    for (const auto& child : children_) child->visit_p2(visit);
  }

 private:
  using Rounded = std::vector<std::pair<at::Tensor, at::Tensor>>;  // tensors, and what they became
  void round_p2(Rounded& rounded);

  Values p1_;
  c10::SmallVector<at::Tensor, 2> p2_;
  std::vector<bool> rounded_;  // by tensor of p2_; empty: none
  Saved* previous_ = nullptr;
  std::shared_ptr<const Context> context_;        // shared: Context is only declared here
  std::vector<std::unique_ptr<Saved>> children_;  // pointers: W units refer to them while the vector grows
};

}  // namespace twobp
