#include "twobp/nn/parameter.h"

#include <functional>

#include <ATen/CPUGeneratorImpl.h>

#include "twobp/core/check.h"
#include "twobp/nn/kernels/gemm.h"
#include "twobp/nn/kernels/rows.h"

namespace twobp {
namespace {

// FNV-1a over the name, mixed with the seed: the same on every platform, unlike std::hash.
uint64_t seed_of(uint64_t seed, const std::string& name) {
  uint64_t hash = 14695981039346656037ull ^ (seed * 0x9e3779b97f4a7c15ull);
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return hash ^ (hash >> 32);  // the generator looks at the lower half alone
}

}  // namespace

Parameter::Parameter(std::vector<ParameterPart> parts, std::vector<int64_t> sizes, at::ScalarType dtype,
                     double std, double fill)
    : parts_(std::move(parts)), sizes_(std::move(sizes)), dtype_(dtype), std_(std), fill_(fill) {
  TWOBP_CHECK(!parts_.empty() && !sizes_.empty(), "a parameter needs a name and a size");
  int64_t rows = 0;
  for (const auto& part : parts_) rows += part.rows;
  TWOBP_CHECK(rows == sizes_[0], "the parts of parameter ", name(), " have ", rows, " rows, the whole ",
              sizes_[0]);
}

Parameter::Parameter(std::string name, at::Tensor initial)
    : parts_({{std::move(name), initial.dim() > 0 ? initial.size(0) : 1}}),
      sizes_(initial.sizes().vec()),
      dtype_(initial.scalar_type()),
      std_(0),
      fill_(0),
      initial_(std::move(initial)) {}

int64_t Parameter::numel() const {
  int64_t n = 1;
  for (const int64_t size : sizes_) n *= size;
  return n;
}

void Parameter::allocate_value(uint64_t seed) {
  // Drawn in float32 whatever the dtype, so that precisions start from the same weights.
  master = at::empty(sizes_, at::TensorOptions().dtype(compute_type(dtype_)));
  if (initial_.defined()) master.copy_(initial_);
  int64_t row = 0;
  for (const auto& part : parts_) {
    if (initial_.defined()) break;
    at::Tensor rows = master.narrow(0, row, part.rows);
    if (std_ > 0) {
      auto generator = at::detail::createCPUGenerator(seed_of(seed, part.name));
      rows.normal_(0.0, std_, generator);
    } else {
      rows.fill_(fill_);
    }
    row += part.rows;
  }
  value = master.to(dtype_);  // the same tensor if that is its dtype
  if (!trainable_) master = value;
}

void Parameter::allocate_grad() {
  has_grad_ = false;
  if (trainable_) grad = at::empty(sizes_, at::TensorOptions().dtype(compute_type(dtype_)));
}

void Parameter::refresh_value() {
  if (!value.is_same(master)) value.copy_(master);
}

void Parameter::accumulate_product(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != grad.scalar_type()) {
    const at::ScalarType type = product_type(a.scalar_type());
    if (type == grad.scalar_type()) {
      accumulate_product(a.to(type), b.to(type));
    } else if (has_grad_) {
      grad.add_(at::mm(a, b));
    } else {
      grad.copy_(at::mm(a, b));
      has_grad_ = true;
    }
  } else if (has_grad_) {
    grad.addmm_(a, b);
  } else {
    at::mm_out(grad, a, b);
    has_grad_ = true;
  }
}

at::Tensor& Parameter::grad_to_add() {
  if (!has_grad_) {
    grad.zero_();
    has_grad_ = true;
  }
  return grad;
}

}  // namespace twobp
