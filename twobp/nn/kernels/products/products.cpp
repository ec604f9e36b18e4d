#include "twobp/nn/kernels/products/products.h"

#include <algorithm>
#include <cpuid.h>

#include "twobp/core/measure.h"
#include "twobp/nn/kernels/products/product_time.h"
#include "twobp/nn/kernels/products/rows.h"

#if defined(__x86_64__)
#endif

namespace twobp {
namespace {

struct Features {
  bool bfloat16 = true;
  bool float16 = true;
};

Features detect() {
  Features features;
#if defined(__x86_64__)
  // Leaf 7 of Intel's and AMD's manuals: AMX-BF16, AVX512-FP16, AVX512-BF16, AMX-FP16.
  unsigned a = 0, b = 0, c = 0, d = 0;
  features = {false, false};
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) != 0) {
    features.bfloat16 = (d >> 22 & 1) != 0;
    features.float16 = (d >> 23 & 1) != 0;
    const unsigned subleaves = a;
    if (subleaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0) {
      features.bfloat16 = features.bfloat16 || (a >> 5 & 1) != 0;
      features.float16 = features.float16 || (a >> 21 & 1) != 0;
    }
  }
#endif
  return features;
}

// The number of terms that a product sums at once. It is less than all terms if a is stored as its transpose and one
// side is narrow, as in W of a projection from or to few numbers. MKL first copies the wide side, with all its terms,
// into the order of its multiplications. A narrow product uses each copied number only a few times. If the copy exceeds
// a core's caches, waiting for it takes most of the time. 192 KiB of float32 stay in the caches
// (benchmarks/product_benchmark).
constexpr int64_t kNarrow = 64;
constexpr int64_t kNumbersAtOnce = 48 * 1024;

int64_t terms_at_once(const at::Tensor& a, const at::Tensor& b) {
  const int64_t terms = a.size(1);
  const auto [narrow, wide] = std::minmax({a.size(0), b.size(1)});
  if (!a.is_cpu() || a.stride(0) != 1 || narrow > kNarrow || wide < 4 * narrow) return terms;
  return std::min(terms, std::max<int64_t>(16, kNumbersAtOnce / wide));
}

// As one_dnn_product, but by ATen. With beta 0, y is only written.
void aten_product(at::Tensor& y, const at::Tensor& a, const at::Tensor& b, double beta, double alpha) {
  const int64_t terms = a.size(1);
  const int64_t at_once = terms_at_once(a, b);
  if (at_once == terms) {
    y.addmm_(a, b, beta, alpha);
    return;
  }
  for (int64_t first = 0; first < terms; first += at_once) {
    const int64_t count = std::min(at_once, terms - first);
    y.addmm_(a.narrow(1, first, count), b.narrow(0, first, count), first == 0 ? beta : 1, alpha);
  }
}

}  // namespace

bool has_instructions_for(at::ScalarType dtype) {
  static const Features features = detect();
  if (dtype == at::kBFloat16) return features.bfloat16;
  if (dtype == at::kHalf) return features.float16;
  return true;
}

at::ScalarType product_type(at::ScalarType dtype) {
  return has_instructions_for(dtype) ? dtype : at::kFloat;
}

at::ScalarType product_type(const at::Tensor& tensor) {
  return tensor.is_cpu() ? product_type(tensor.scalar_type()) : tensor.scalar_type();
}

void multiply_into(at::Tensor& y, const at::Tensor& a, const at::Tensor& b) {
  const at::ScalarType type = product_type(y);
  const ProductTimer timer(a.size(0), b.size(1), a.size(1));
  if (one_dnn_is_faster(y, a, b)) {
    one_dnn_product(y, a, b, 0, 1);
  } else if (type == y.scalar_type()) {
    aten_product(y, a, b, 0, 1);
  } else {
    y.copy_(at::mm(a.to(type), b.to(type)));
  }
}

void multiply_and_add(at::Tensor& y, const at::Tensor& a, const at::Tensor& b, const at::Tensor& row) {
  const at::ScalarType type = product_type(y);
  if (type == compute_type(type) && type == y.scalar_type()) {
    multiply_into(y, a, b);
    add_row(y, row);  // ATen's addmm first writes the row everywhere, which is slower
    return;
  }
  const ProductTimer timer(a.size(0), b.size(1), a.size(1));
  if (type == y.scalar_type()) {
    at::addmm_out(y, row.to(type), a, b);
  } else {
    y.copy_(at::addmm(row.to(type), a.to(type), b.to(type)));
  }
}

void multiply_add(at::Tensor& y, const at::Tensor& a, const at::Tensor& b, double scale) {
  const at::ScalarType type = product_type(a);
  const ProductTimer timer(a.size(0), b.size(1), a.size(1));
  if (one_dnn_is_faster(y, a, b)) {
    one_dnn_product(y, a, b, 1, static_cast<float>(scale));
  } else if (type == a.scalar_type() && type == y.scalar_type()) {
    aten_product(y, a, b, 1, scale);
  } else {
    y.add_(at::mm(a.to(type), b.to(type)), scale);
  }
}

void write_product(at::Tensor y, const at::Tensor& a, const at::Tensor& b, bool adds) {
  if (a.scalar_type() == y.scalar_type()) return adds ? multiply_add(y, a, b) : multiply_into(y, a, b);
  const at::ScalarType type = product_type(a);
  if (type == y.scalar_type()) return write_product(y, a.to(type), b.to(type), adds);
  const ProductTimer timer(a.size(0), b.size(1), a.size(1));
  // A GPU's product has float32 sums, which are not rounded, and is added where it is made.
  if (!a.is_cpu()) {
    adds ? at::addmm_out(y, y, a, b, y.scalar_type()) : at::mm_out(y, a, b, y.scalar_type());
  } else {
    const at::Tensor product = at::mm(a, b);
    adds ? y.add_(product) : y.copy_(product);
  }
}

namespace {

thread_local ProductTime here;

}  // namespace

ProductTime product_time() {
  return here;
}

void add_product_time(const ProductTime& time) {
  here += time;
}

void count_operations(double operations) {
  here.operations += operations;
}

ProductTimer::ProductTimer(double operations) : begin_(now_seconds()) {
  count_operations(operations);
}

ProductTimer::~ProductTimer() {
  here.seconds += now_seconds() - begin_;
}

}  // namespace twobp
