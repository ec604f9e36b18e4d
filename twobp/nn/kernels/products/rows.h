// Runs a kernel over the rows of a matrix: dispatches on the dtype and splits the rows over the rank's threads.
#pragma once

#include <type_traits>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "twobp/core/check.h"
#include "twobp/nn/kernels/kernels.h"

namespace twobp {

template <typename S>
constexpr at::ScalarType scalar_type_of() {
  if constexpr (std::is_same_v<S, BFloat16>) {
    return at::kBFloat16;
  } else if constexpr (std::is_same_v<S, Half>) {
    return at::kHalf;
  } else {
    return c10::CppTypeToScalarType<S>::value;
  }
}

// Checks what all kernels require: numbers of this type, in a CPU's memory.
template <typename S>
void check_numbers(const at::Tensor& tensor) {
  TWOBP_CHECK(tensor.scalar_type() == scalar_type_of<S>(), "a kernel takes ", c10::toString(scalar_type_of<S>()),
              ", got ", c10::toString(tensor.scalar_type()));
  TWOBP_CHECK(tensor.is_cpu(), "a kernel for CPUs got a tensor on ", tensor.device().str(),
              ": this layer does not run there yet");
}

// The tensor's numbers in the type that the kernels take.
template <typename S>
const S* numbers(const at::Tensor& tensor) {
  check_numbers<S>(tensor);
  return static_cast<const S*>(tensor.const_data_ptr());
}
template <typename S>
S* mutable_numbers(const at::Tensor& tensor) {
  check_numbers<S>(tensor);
  return static_cast<S*>(tensor.mutable_data_ptr());
}

// Calls body(S{}) with S float, double, BFloat16 or Half.
template <typename Body>
void dispatch_float(at::ScalarType type, const char* who, Body&& body) {
  if (type == at::kFloat) {
    body(float{});
  } else if (type == at::kDouble) {
    body(double{});
  } else if (type == at::kBFloat16) {
    body(BFloat16{});
  } else if (type == at::kHalf) {
    body(Half{});
  } else {
    fail(who, ": dtype ", c10::toString(type), " is not supported, only float32, float64, bfloat16 and float16");
  }
}

// Calls body(T{}) with T float or double. The tensor must have one of these dtypes.
template <typename Body>
void dispatch_wide(const at::Tensor& tensor, Body&& body) {
  if (tensor.scalar_type() == at::kFloat) {
    body(float{});
  } else {
    body(double{});
  }
}

// The dtype of sums of numbers of `type`, and of small vectors (norm gains, rotations).
inline at::ScalarType compute_type(at::ScalarType type) {
  return type == at::kDouble ? at::kDouble : at::kFloat;
}

// Calls body(begin, end) on ranges of rows, each of at least about 16 Ki numbers.
template <typename Body>
void for_rows(int64_t rows, int64_t cols, Body&& body) {
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, cols));
  at::parallel_for(0, rows, grain, std::forward<Body>(body));
}

}  // namespace twobp
