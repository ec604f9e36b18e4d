// The arguments of a call of an operator: as our own operators take them, and what is checked of them for ATen's.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include "twobp/core/check.h"

namespace twobp::graph {

using Stack = std::vector<c10::IValue>;

// The last `count` values on a stack.
class OnStack {
 public:
  OnStack(Stack& stack, size_t count) : stack_(stack), first_(stack.size() - count) {}

  int64_t integer(size_t i) const { return stack_[first_ + i].toInt(); }
  bool flag(size_t i) const { return stack_[first_ + i].toBool(); }
  double number(size_t i) const { return stack_[first_ + i].toDouble(); }
  std::optional<double> maybe_number(size_t i) const {
    return stack_[first_ + i].isNone() ? std::nullopt : std::optional(stack_[first_ + i].toDouble());
  }

 protected:
  Stack& stack_;
  size_t first_;
};

// The arguments of a call, which it takes off the stack. A tensor that the stack alone held is then exclusively owned.
class Arguments : public OnStack {
 public:
  using OnStack::OnStack;
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;

  at::Tensor tensor(size_t i) { return std::move(stack_[first_ + i]).toTensor(); }
  at::Tensor maybe(size_t i) {
    return stack_[first_ + i].isNone() ? at::Tensor() : std::move(stack_[first_ + i]).toTensor();
  }
  at::Scalar scalar(size_t i) const { return stack_[first_ + i].toScalar(); }
  std::string text(size_t i) const { return stack_[first_ + i].toStringRef(); }

  // Leaves these results.
  template <typename... Results>
  void give(Results... results) {
    stack_.resize(first_);
    (stack_.emplace_back(std::move(results)), ...);
  }
};

// The arguments of a call that is checked.
class CheckedCall : public OnStack {
 public:
  using OnStack::OnStack;

  size_t size() const { return stack_.size() - first_; }
  const at::Tensor& tensor(size_t i) const { return stack_[first_ + i].toTensor(); }
  bool has(size_t i) const { return stack_[first_ + i].isTensor() && tensor(i).defined(); }
  std::vector<int64_t> integers(size_t i) const { return stack_[first_ + i].toIntVector(); }

  // The kernel indexes the memory of these tensors, where there are any.
  void make_contiguous(std::initializer_list<size_t> which) {
    for (const size_t i : which) {
      if (has(i) && !tensor(i).is_contiguous()) stack_[first_ + i] = tensor(i).contiguous();
    }
  }
  // The kernel steps through the last dimension by one element.
  void make_last_dense(std::initializer_list<size_t> which) {
    for (const size_t i : which) {
      if (has(i) && tensor(i).dim() > 0 && tensor(i).stride(-1) != 1) stack_[first_ + i] = tensor(i).contiguous();
    }
  }

  void require_sizes(size_t i, at::IntArrayRef sizes) const {
    TWOBP_CHECK(tensor(i).sizes() == sizes, "argument ", i, " has the sizes ", tensor(i).sizes(), ", but must have ",
                sizes);
  }
  void require_same_sizes(size_t i, size_t as) const { require_sizes(i, tensor(as).sizes()); }
  void require_dtype(size_t i, at::ScalarType dtype) const {
    TWOBP_CHECK(tensor(i).scalar_type() == dtype, "argument ", i, " is of ", tensor(i).scalar_type(),
                ", but must be of ", dtype);
  }
  void require_same(size_t i, size_t as) const {
    require_same_sizes(i, as);
    require_dtype(i, tensor(as).scalar_type());
  }
  // The same dimensions before the last `spatial` ones.
  void require_same_outer(size_t i, size_t as, int64_t spatial) const {
    const auto [a, b] = std::pair(tensor(i).sizes(), tensor(as).sizes());
    const bool same =
        a.size() == b.size() && static_cast<int64_t>(a.size()) >= spatial &&
        a.slice(0, a.size() - static_cast<size_t>(spatial)) == b.slice(0, b.size() - static_cast<size_t>(spatial));
    TWOBP_CHECK(same, "argument ", i, " has the sizes ", a, " and argument ", as, " ", b, ", but only the last ",
                spatial, " may differ");
    require_dtype(i, tensor(as).scalar_type());
  }
  void require_numel(size_t i, int64_t count) const {
    TWOBP_CHECK(tensor(i).numel() == count, "argument ", i, " has the sizes ", tensor(i).sizes(), ", but must have ",
                count, " elements");
  }
  // A GPU would have to wait for the host, and its own checks end the run.
  void require_indices(size_t i, int64_t count, std::optional<int64_t> but = std::nullopt) const {
    const at::Tensor& indices = tensor(i);
    TWOBP_CHECK(at::isIntegralType(indices.scalar_type(), false), "argument ", i, " must be whole numbers, not ",
                indices.scalar_type());
    if (!indices.is_cpu() || indices.numel() == 0) return;
    at::Tensor outside = indices.lt(0).logical_or_(indices.ge(count));
    if (but) outside.logical_and_(indices.ne(*but));
    TWOBP_CHECK(!outside.any().item<bool>(), "argument ", i, " has an index outside 0 to ", count - 1);
  }
};

// What LibTorch's kernels rely on without checking it. Autograd passes them nothing else, but a bundle could, and they
// would read or write outside their tensors, or give what was in memory before. tests/graph/operator_sweep looks for
// operators that need a check.
// Checks the arguments of a call. Throws Error. May replace a tensor by one with other strides.
using ArgumentCheck = void (*)(CheckedCall& call);

// The check of ATen's operator of this name and overload, "median.dim"; null if it checks its arguments itself.
ArgumentCheck find_check(std::string_view name);

}  // namespace twobp::graph
