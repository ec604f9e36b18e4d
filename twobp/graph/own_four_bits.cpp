#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include "twobp/core/check.h"
#include "twobp/graph/own_operators.h"
#include "twobp/nn/kernels/products/products.h"
#include "twobp/nn/kernels/rows/operators.h"

namespace twobp::graph {
namespace {

constexpr int64_t kCodes = 16;
constexpr int64_t kMostNumbers = int64_t{1} << 40;
constexpr int64_t kGrain = 1 << 15;  // numbers that repay a thread

// A weight as bitsandbytes keeps it: each byte has two indices into `code`, the higher four bits first, and each
// `block` of numbers has a scale.
struct FourBits {
  at::Tensor packed;
  at::Tensor scales;
  at::Tensor code;
  int64_t block;
};

void check_weight(const FourBits& weight, int64_t rows, int64_t columns) {
  TWOBP_CHECK(rows > 0 && columns > 0 && rows <= kMostNumbers / columns && weight.block > 0 && weight.block % 2 == 0,
              "a weight of 4 bits has rows, columns and blocks of an even size, not (", rows, ", ", columns,
              ") in blocks of ", weight.block);
  const int64_t numbers = rows * columns;
  const int64_t blocks = (numbers - 1) / weight.block + 1;
  TWOBP_CHECK(weight.packed.scalar_type() == at::kByte && weight.packed.numel() == (numbers + 1) / 2 &&
                  weight.scales.scalar_type() == at::kFloat && weight.scales.numel() == blocks &&
                  weight.code.scalar_type() == at::kFloat && weight.code.numel() == kCodes,
              "a weight (", rows, ", ", columns, ") of 4 bits in blocks of ", weight.block, " has ", (numbers + 1) / 2,
              " bytes, ", blocks, " scales and a code of 16 numbers in float32, not ", weight.packed.sizes(), " ",
              c10::toString(weight.packed.scalar_type()), ", ", weight.scales.sizes(), " and ", weight.code.sizes());
}

template <typename T>
void dequantise(const FourBits& weight, T* to, int64_t numbers) {
  std::array<std::array<float, 2>, 256> pairs{};
  const float* code = weight.code.const_data_ptr<float>();
  for (size_t byte = 0; byte < pairs.size(); ++byte) pairs[byte] = {code[byte / kCodes], code[byte % kCodes]};
  const uint8_t* packed = weight.packed.const_data_ptr<uint8_t>();
  const float* scales = weight.scales.const_data_ptr<float>();
  const int64_t blocks = weight.scales.numel();
  at::parallel_for(0, blocks, std::max<int64_t>(1, kGrain / weight.block), [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      const int64_t begin = block * weight.block;
      const int64_t end = std::min(numbers, begin + weight.block);
      const float scale = scales[block];
      int64_t i = begin;
      for (; i + 1 < end; i += 2) {
        const auto& pair = pairs[packed[i / 2]];
        to[i] = static_cast<T>(pair[0] * scale);
        to[i + 1] = static_cast<T>(pair[1] * scale);
      }
      if (i < end) to[i] = static_cast<T>(pairs[packed[i / 2]][0] * scale);
    }
  });
}

at::Tensor of_operators(const FourBits& weight, int64_t numbers, at::ScalarType dtype) {
  const at::Tensor indices =
      at::stack({at::bitwise_right_shift(weight.packed.flatten(), 4), at::bitwise_and(weight.packed.flatten(), 15)}, 1)
          .flatten()
          .narrow(0, 0, numbers);
  const at::Tensor scales = weight.scales.flatten().repeat_interleave(weight.block).narrow(0, 0, numbers);
  return weight.code.flatten().index_select(0, indices.to(at::kInt)).mul_(scales).to(dtype);
}

at::Tensor dequantised(FourBits weight, int64_t rows, int64_t columns, at::ScalarType dtype) {
  check_weight(weight, rows, columns);
  if (by_operators(weight.packed)) return of_operators(weight, rows * columns, dtype).view({rows, columns});
  for (at::Tensor* one : {&weight.packed, &weight.scales, &weight.code}) *one = one->contiguous();
  at::Tensor to = at::empty({rows, columns}, weight.scales.options().dtype(dtype));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, dtype, "four_bits",
                                  [&] { dequantise(weight, to.mutable_data_ptr<scalar_t>(), rows * columns); });
  return to;
}

at::Tensor rows_product(const at::Tensor& a, const at::Tensor& b) {
  if (!is_wide(a) || by_operators(a)) return at::mm(a, b);
  at::Tensor y = at::empty({a.size(0), b.size(1)}, a.options());
  multiply_into(y, a, b);
  return y;
}

// x (..., n) as rows, times a weight.
at::Tensor rows_times(const at::Tensor& x, const at::Tensor& weight) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = weight.size(1);
  if (x.numel() == 0) return at::zeros(sizes, x.options());
  return rows_product(x.reshape({-1, x.size(-1)}), weight).view(sizes);
}

void check_rows(const at::Tensor& x) {
  TWOBP_CHECK(x.dim() > 0 && x.is_floating_point(), "a product with a weight of 4 bits takes numbers (..., n), not ",
              x.sizes(), " ", c10::toString(x.scalar_type()));
}

void run_linear(Stack& stack) {
  Arguments arguments(stack, 7);
  const at::Tensor x = arguments.tensor(0);
  check_rows(x);
  const at::Tensor weight =
      dequantised({arguments.tensor(1), arguments.tensor(2), arguments.tensor(3), arguments.integer(5)},
                  arguments.integer(4), x.size(-1), x.scalar_type());
  arguments.give(rows_times(x, weight.t()));
}

void run_linear_backward(Stack& stack) {
  Arguments arguments(stack, 7);
  const at::Tensor dy = arguments.tensor(0);
  check_rows(dy);
  const auto rounded = static_cast<at::ScalarType>(arguments.integer(6));
  TWOBP_CHECK(at::isFloatingType(rounded), "a weight of 4 bits is rounded to a floating-point dtype, not ",
              c10::toString(rounded));
  const at::Tensor weight =
      dequantised({arguments.tensor(1), arguments.tensor(2), arguments.tensor(3), arguments.integer(5)}, dy.size(-1),
                  arguments.integer(4), rounded);
  arguments.give(rows_times(dy, weight.to(dy.scalar_type())));
}

constexpr OwnOperator kFourBits[] = {
    {"twobp::linear_4bit(Tensor x, Tensor packed, Tensor scales, Tensor code, int rows, int block, "
     "ScalarType dtype) -> Tensor y",
     &run_linear},
    {"twobp::linear_4bit_backward(Tensor dy, Tensor packed, Tensor scales, Tensor code, int columns, int block, "
     "ScalarType dtype) -> Tensor dx",
     &run_linear_backward}};

}  // namespace

std::span<const OwnOperator> four_bit_operators() {
  return kFourBits;
}

}  // namespace twobp::graph
