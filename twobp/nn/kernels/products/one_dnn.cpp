#include <optional>

#include "twobp/nn/kernels/instruction_sets.h"
#include "twobp/nn/kernels/products/products.h"

#if TWOBP_ONEDNN
// LibTorch's library has this function, but no header declares it. CMake checks that it links.
namespace at::native {
void mkldnn_matmul(const Tensor& a, const Tensor& b, const Tensor& y, float beta, float alpha);
}
#endif

namespace twobp {
namespace {

std::optional<bool> forced;

}  // namespace

OneDnnForced::OneDnnForced(bool multiplies) {
  forced = multiplies;
}

OneDnnForced::~OneDnnForced() {
  forced.reset();
}

#if TWOBP_ONEDNN
namespace {

// Below this number of multiply-adds, the overhead of a call exceeds its gain.
constexpr int64_t kLeastOperations = int64_t{1} << 24;

bool is_transpose_of_dense(const at::Tensor& t) {
  return t.stride(0) == 1 && t.stride(1) == t.size(0);
}

}  // namespace

bool one_dnn_multiplies() {
  static const bool can = supports(InstructionSet::kAvx512);  // without it, LibTorch's function throws
  static const bool is_faster = is_amd();
  return can && forced.value_or(is_faster);
}

bool one_dnn_is_faster(const at::Tensor& y, const at::Tensor& a, const at::Tensor& b) {
  if (!one_dnn_multiplies() || !y.is_cpu()) return false;
  for (const at::Tensor* t : {&y, &a, &b}) {
    if (t->scalar_type() != at::kFloat || t->dim() != 2) return false;
    if (!t->is_contiguous() && (t == &y || !is_transpose_of_dense(*t))) return false;
  }
  return a.size(0) * a.size(1) * b.size(1) >= kLeastOperations;
}

void one_dnn_product(at::Tensor& y, const at::Tensor& a, const at::Tensor& b, float beta, float alpha) {
  at::native::mkldnn_matmul(a, b, y, beta, alpha);
}
#else
bool one_dnn_multiplies() {
  return false;
}

bool one_dnn_is_faster(const at::Tensor& /*y*/, const at::Tensor& /*a*/, const at::Tensor& /*b*/) {
  return false;
}

void one_dnn_product(at::Tensor& y, const at::Tensor& a, const at::Tensor& b, float beta, float alpha) {
  y.addmm_(a, b, beta, alpha);
}
#endif

}  // namespace twobp
