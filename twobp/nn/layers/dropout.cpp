#include "twobp/nn/layers/dropout.h"

#include "twobp/nn/kernels/products/rows.h"

namespace twobp {
namespace {

Values dropped(Values values, const DropoutRate& rate, const Context& context) {
  if (!rate.active(context)) return values;
  at::Tensor x = as_contiguous(std::move(values[0]));
  const at::Tensor y = exclusively_owned(x) ? x : at::empty(x.sizes(), x.options());
  const int64_t cols = x.size(-1);
  const DropoutMask mask = rate.mask(context);
  for_rows(x.numel() / cols, cols,
           [&](int64_t begin, int64_t end) { dropout_rows(x, {}, y, cols, mask, begin, end); });
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
