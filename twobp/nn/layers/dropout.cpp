#include "twobp/nn/layers/dropout.h"

#include <algorithm>
#include <cmath>

#include "twobp/core/random.h"
#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/kernels/rows/operators.h"
#include "twobp/nn/kernels/rows/row_kernels.h"

namespace twobp {
namespace {

Values dropped(Values values, const DropoutRate& rate, const Context& context) {
  if (!rate.active(context)) return values;
  at::Tensor x = as_contiguous(std::move(values[0]));
  const at::Tensor y = exclusively_owned(x) ? x : at::empty(x.sizes(), x.options());
  const int64_t cols = x.size(-1);
  const DropoutMask mask = rate.mask(context);
  const int64_t rows = x.numel() / cols;
  const auto drop = [&](int64_t begin, int64_t end) { dropout_rows(x, {}, y, cols, mask, begin, end); };
  if (by_operators(x)) {  // in this thread's stream
    drop(0, rows);
  } else {
    for_rows(rows, cols, drop);
  }
  return {y};
}

}  // namespace

Values Dropout::forward(Values x, Context& context, Saved&) {
  return dropped(std::move(x), rate_, context);
}

Values Dropout::backward_p1(Values dy, Context& context, Saved&) {
  return dropped(std::move(dy), rate_, context);
}

namespace {

// SplitMix64's finalizer (Steele, Lea, Flood, OOPSLA 2014): every bit of the result depends on every bit.
uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

constexpr uint32_t kOne = 1u << 16;

}  // namespace

DropoutRate::DropoutRate(double probability, std::string_view name) : name_hash_(Hash().add(name).value()) {
  TWOBP_CHECK(probability >= 0 && probability < 1, "dropout of ", name, " has probability ", probability,
              ", which must be in [0, 1)");
  threshold_ = std::min(kOne - 1, static_cast<uint32_t>(std::lround(probability * kOne)));
}

DropoutMask DropoutRate::mask(const Context& context) const {
  DropoutMask mask;
  if (!active(context)) return mask;
  const uint64_t key = mixed(mixed(mixed(context.seed) ^ static_cast<uint64_t>(context.step)) ^ name_hash_);
  mask.key[0] = static_cast<uint32_t>(key);
  mask.key[1] = static_cast<uint32_t>(key >> 32);
  mask.micro_batch = static_cast<uint32_t>(context.micro_batch);
  mask.threshold = threshold_;
  mask.scale = static_cast<double>(kOne) / (kOne - threshold_);
  if (context.sliced()) {
    mask.length = static_cast<uint32_t>(context.slice.length);
    mask.first = static_cast<uint32_t>(context.past);
    mask.positions = static_cast<uint32_t>(context.slice.positions);
  }
  return mask;
}

void dropout_rows(const at::Tensor& x, const at::Tensor& add, const at::Tensor& y, int64_t cols,
                  const DropoutMask& mask, int64_t begin, int64_t end) {
  if (by_operators(x)) {
    const auto rows = [&](const at::Tensor& tensor) { return tensor.view({-1, cols}).slice(0, begin, end); };
    at::Tensor dropped = rows(x);
    if (mask.threshold > 0) {
      const auto options = x.options().dtype(compute_type(x.scalar_type()));
      const at::Tensor which = at::arange(begin, end, options.dtype(at::kLong));
      dropped = dropped * operators::dropout_factors(mask, which, cols, options);
    }
    rows(y).copy_(add.defined() ? dropped + rows(add) : dropped);
    return;
  }
  dispatch_float(x.scalar_type(), "Dropout", [&](auto zero) {
    using S = decltype(zero);
    encoder_kernels<S>().dropout(numbers<S>(x) + begin * cols, add.defined() ? numbers<S>(add) + begin * cols : nullptr,
                                 mutable_numbers<S>(y) + begin * cols, end - begin, cols, mask, begin);
  });
}

}  // namespace twobp
