// Helpers that our own operators share: they take arguments off the stack and check them.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include <ATen/ATen.h>

#include "twobp/graph/operators.h"

namespace twobp::graph {

// The arguments of a call, which it takes off the stack. A tensor that the stack alone held is then exclusively owned.
class Arguments {
 public:
  Arguments(Stack& stack, size_t count) : stack_(stack), first_(stack.size() - count) {}
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;

  at::Tensor tensor(size_t i) { return std::move(stack_[first_ + i]).toTensor(); }
  at::Tensor maybe(size_t i) {
    return stack_[first_ + i].isNone() ? at::Tensor() : std::move(stack_[first_ + i]).toTensor();
  }
  std::optional<double> maybe_number(size_t i) const {
    return stack_[first_ + i].isNone() ? std::nullopt : std::optional(stack_[first_ + i].toDouble());
  }
  double number(size_t i) const { return stack_[first_ + i].toDouble(); }
  int64_t integer(size_t i) const { return stack_[first_ + i].toInt(); }
  at::Scalar scalar(size_t i) const { return stack_[first_ + i].toScalar(); }
  bool flag(size_t i) const { return stack_[first_ + i].toBool(); }
  std::string text(size_t i) const { return stack_[first_ + i].toStringRef(); }

  // Leaves these results.
  template <typename... Results>
  void give(Results... results) {
    stack_.resize(first_);
    (stack_.emplace_back(std::move(results)), ...);
  }

 private:
  Stack& stack_;
  size_t first_;
};

inline bool is_wide(const at::Tensor& x) {
  return x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble;
}

// Throws Error if cos and sin are no tables of rotary embedding. `head_dim` numbers turn in pairs.
void check_tables(const at::Tensor& cos, const at::Tensor& sin, int64_t positions, int64_t head_dim,
                  at::ScalarType dtype);

}  // namespace twobp::graph
