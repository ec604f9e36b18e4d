// Runs a kernel over the rows of a matrix: dispatch on the dtype, rows split over the rank's threads.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "twobp/core/check.h"
#include "twobp/nn/kernels/kernels.h"

namespace twobp {

// body(T{}) with T float or double.
template <typename Body>
void dispatch_float(at::ScalarType type, const char* who, Body&& body) {
  if (type == at::kFloat) {
    body(float{});
  } else if (type == at::kDouble) {
    body(double{});
  } else {
    fail(who, ": dtype ", c10::toString(type), " is not supported, only float32 and float64");
  }
}

// body(begin, end) over rows, in pieces of about 16 Ki numbers at least.
template <typename Body>
void for_rows(int64_t rows, int64_t cols, Body&& body) {
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, cols));
  at::parallel_for(0, rows, grain, std::forward<Body>(body));
}

}  // namespace twobp
