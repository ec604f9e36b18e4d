#include "twobp/nn/layers/dropout.h"

#include "twobp/nn/kernels/operators.h"
#include "twobp/nn/kernels/products/rows.h"

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

}  // namespace twobp
