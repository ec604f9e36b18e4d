#include "twobp/train/update/square_sums.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/kernels/rows/operators.h"

namespace twobp {
namespace {

// With 2^23 blocks, of 2^35 numbers, digits are still exact. The range is that of squares of float32.
constexpr int kBits = 30;
constexpr int kLowest = -300;
constexpr int kMantissa = std::numeric_limits<double>::digits;

}  // namespace

at::Tensor square_sums(int64_t rows) {
  return at::zeros({rows, kSquareDigits}, at::TensorOptions().dtype(at::kDouble));
}

void add_exactly(double number, double* digits) {
  if (number == 0) return;
  if (!std::isfinite(number)) {
    digits[0] += number;
    return;
  }
  int exponent = 0;
  auto whole = static_cast<unsigned __int128>(std::ldexp(std::frexp(number, &exponent), kMantissa));
  const int shift = exponent - kMantissa - kLowest;
  if (shift <= -kMantissa) return;
  whole = shift < 0 ? whole >> -shift : whole << (shift % kBits);
  for (int digit = std::max(shift, 0) / kBits; whole > 0; ++digit, whole >>= kBits) {
    if (digit >= kSquareDigits) {
      digits[0] += std::numeric_limits<double>::infinity();
      return;
    }
    digits[digit] += static_cast<double>(static_cast<uint64_t>(whole) & ((uint64_t{1} << kBits) - 1));
  }
}

void add_squares(const std::vector<at::Tensor>& tensors, const std::vector<int64_t>& rows, at::Tensor& sums) {
  auto* const digits = sums.mutable_data_ptr<double>();
  std::vector<at::Tensor> later;
  std::vector<int64_t> later_rows;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    if (tensor.numel() == 0) continue;
    if (by_operators(tensor)) {
      later.push_back(operators::sums_of_squares(tensor));
      later_rows.insert(later_rows.end(), later.back().numel(), rows[i]);
      continue;
    }
    dispatch_float(tensor.scalar_type(), "gradient norm", [&](auto zero) {
      using S = decltype(zero);
      const S* const x = numbers<S>(tensor);
      for (int64_t at = 0; at < tensor.numel(); at += kSquareBlock) {
        const int64_t count = std::min(kSquareBlock, tensor.numel() - at);
        add_exactly(kernels<S>().sum_of_squares(x + at, count), digits + rows[i] * kSquareDigits);
      }
    });
  }
  if (later.empty()) return;
  const at::Tensor read = at::cat(later).cpu();
  for (size_t i = 0; i < later_rows.size(); ++i)
    add_exactly(read.const_data_ptr<double>()[i], digits + later_rows[i] * kSquareDigits);
}

std::vector<double> values_of(const at::Tensor& sums) {
  std::vector<double> values;
  const double* digit = sums.const_data_ptr<double>();
  for (int64_t row = 0; row < sums.size(0); ++row) {
    double value = 0;
    for (int i = 0; i < kSquareDigits; ++i) value += std::ldexp(*digit++, kLowest + kBits * i);
    values.push_back(value);
  }
  return values;
}

}  // namespace twobp
