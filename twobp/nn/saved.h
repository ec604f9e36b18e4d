// The tensors that a layer keeps for one micro-batch. Each is marked as needed until backward-p1 or until
// backward-p2. They are released as early as possible: `take_p1` moves a tensor out for good.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "twobp/nn/values.h"

namespace twobp {

struct Context;

class Saved {
 public:
  void keep_until_p1(at::Tensor tensor) { p1_.push_back(std::move(tensor)); }
  void keep_until_p2(at::Tensor tensor) { p2_.push_back(std::move(tensor)); }

  // Moves the i-th until-p1 tensor out, in the order kept. Throws if it does not exist (backward without
  // forward).
  at::Tensor take_p1(size_t i);
  // The i-th until-p2 tensor, in the order kept.
  const at::Tensor& p2(size_t i) const;
  size_t p1_count() const { return p1_.size(); }
  size_t p2_count() const { return p2_.size(); }

  // The part of the i-th child of a container.
  Saved& child(size_t i);
  size_t child_count() const { return children_.size(); }

  // The micro-batch's context, for a layer that repeats earlier work. Its fields live until the end of the
  // step. Throws if no context was kept.
  void keep_context(const Context& context);
  const Context& context() const;
  bool has_context() const { return context_ != nullptr; }

  // Generation's data about earlier positions. Survives release().
  at::Tensor cache;

  void release_p1() { p1_.clear(); }
  void release_p2() { p2_.clear(); }
  // Drops everything, including the children's tensors.
  void release();

  // Calls visit(tensor) for the tensors that are kept until p2, here and in the children.
  template <typename Visit>
  void visit_p2(Visit&& visit) const {
    for (const auto& tensor : p2_) visit(tensor);
    for (const auto& child : children_) child->visit_p2(visit);
  }

 private:
  Values p1_;
  c10::SmallVector<at::Tensor, 2> p2_;
  std::shared_ptr<const Context> context_;        // shared: Context is only declared here
  std::vector<std::unique_ptr<Saved>> children_;  // pointers: W units refer to them while the vector grows
};

}  // namespace twobp
