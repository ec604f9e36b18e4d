#include "twobp/nn/kernels/rope.h"

#include "twobp/nn/kernels/operators.h"
#include "twobp/nn/kernels/products/padded_rows.h"
#include "twobp/nn/kernels/products/rows.h"

namespace twobp {

void rope(at::Tensor& packed, const at::Tensor& cos, const at::Tensor& sin, const RowHeads& heads, bool back) {
  if (by_operators(packed)) return operators::rope(packed, cos, sin, heads, back ? -1 : 1);
  dispatch_float(packed.scalar_type(), "Attention", [&](auto zero) {
    using S = decltype(zero);
    S* x = mutable_numbers<S>(packed) + heads.first;
    const int64_t stride = row_stride(packed);
    const int64_t positions = packed.size(1);
    const int64_t half = cos.size(-1);
    const auto* c = numbers<Compute<S>>(cos);
    const auto* s = numbers<Compute<S>>(sin);
    const auto sign = static_cast<Compute<S>>(back ? -1 : 1);
    for_rows(packed.size(0) * positions, 2 * heads.count * half, [&](int64_t begin, int64_t end) {
      kernels<S>().rope(x + begin * stride, c, s, sign, end - begin, begin, stride, heads.count, heads.step, half,
                        positions);
    });
  });
}

}  // namespace twobp
