#include "twobp/nn/parameter.h"

#include <functional>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>

#include "twobp/core/check.h"
#include "twobp/nn/kernels/products/products.h"
#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/kernels/rows/operators.h"

namespace twobp {
namespace {

// FNV-1a over the name, mixed with the seed: the same on every platform, unlike std::hash.
uint64_t seed_of(uint64_t seed, const std::string& name) {
  uint64_t hash = 14695981039346656037ull ^ (seed * 0x9e3779b97f4a7c15ull);
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return hash ^ (hash >> 32);  // the generator reads only the lower half
}

}  // namespace

at::Tensor as_matrix_of_rows(const at::Tensor& tensor) {
  if (tensor.dim() == 2) return tensor;
  const at::Tensor dense = tensor.is_contiguous() ? tensor : tensor.permute({0, 2, 3, 1});
  return dense.view({tensor.size(0), -1});
}

Parameter::Parameter(std::vector<ParameterPart> parts, std::vector<int64_t> sizes, at::ScalarType dtype, double std,
                     double fill)
    : parts_(std::move(parts)), sizes_(std::move(sizes)), dtype_(dtype), std_(std), fill_(fill) {
  TWOBP_CHECK(!parts_.empty(), "a parameter needs a name");
  int64_t rows = 0;
  for (const auto& part : parts_) rows += part.rows;
  const int64_t whole = sizes_.empty() ? 1 : sizes_[0];
  TWOBP_CHECK(rows == whole, "the parts of parameter ", name(), " have ", rows, " rows, but the whole has ", whole);
}

Parameter::Parameter(std::string name, at::Tensor initial)
    : parts_({{std::move(name), initial.dim() > 0 ? initial.size(0) : 1}}),
      sizes_(initial.sizes().vec()),
      dtype_(initial.scalar_type()),
      std_(0),
      fill_(0),
      initial_(std::move(initial)) {}

Parameter Parameter::buffer(const std::string& name, std::vector<int64_t> sizes, at::ScalarType dtype, double fill) {
  const int64_t rows = sizes.empty() ? 1 : sizes[0];
  Parameter buffer({{name, rows}}, std::move(sizes), dtype, 0, fill);
  buffer.is_buffer_ = true;
  buffer.trainable_ = false;
  return buffer;
}

Parameter Parameter::expert_tokens(Parameter& correction, double rate) {
  Parameter tokens = buffer(correction.name() + ".tokens", correction.sizes(), at::kLong, 0);
  tokens.corrected_ = &correction;
  tokens.rate_ = rate;
  correction.is_corrected_ = true;
  return tokens;
}

void Parameter::balance() {
  const at::Tensor above_mean = value * value.numel() - value.sum();  // in whole numbers
  corrected_->value.sub_(above_mean.sign().to(corrected_->value.scalar_type()), rate_);
  forget_tokens();
}

const std::vector<ParameterPart>& Parameter::parts() const {
  static const std::vector<ParameterPart> none;
  return counts_tokens() ? none : parts_;
}

std::vector<std::pair<std::string, at::Tensor>> Parameter::parts_of(const at::Tensor& whole) const {
  if (counts_tokens()) return {};
  if (parts_.size() == 1) return {{name(), whole}};  // also if it has no dimensions
  std::vector<std::pair<std::string, at::Tensor>> all;
  int64_t row = 0;
  for (const ParameterPart& part : parts_) {
    all.emplace_back(part.name, whole.narrow(0, row, part.rows));
    row += part.rows;
  }
  return all;
}

std::vector<at::Tensor> Parameter::projections_of(const at::Tensor& whole) const {
  std::vector<at::Tensor> all;
  const auto parts = parts_of(whole);
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto& [outputs, groups, columns] = parts_[i].projections;
    if (outputs.empty()) {
      all.push_back(parts[i].second);
      continue;
    }
    const int64_t dim = columns ? 1 : 0;
    const at::Tensor grouped = parts[i].second.unflatten(dim, {groups, -1});
    int64_t begin = 0;
    for (const int64_t count : outputs) {
      const at::Tensor one = grouped.narrow(dim + 1, begin, count / groups);
      begin += count / groups;
      all.push_back(groups == 1 ? one.squeeze(dim) : columns ? one.permute({1, 2, 0}) : one);
    }
  }
  return all;
}

int64_t Parameter::numel() const {
  int64_t n = 1;
  for (const int64_t size : sizes_) n *= size;
  return n;
}

void Parameter::allocate_value(uint64_t seed) {
  if (is_buffer_) {
    value = master = at::full(sizes_, fill_, at::TensorOptions().dtype(dtype_));
    return;
  }
  // Drawn in float32 for every dtype, so that all precisions start from the same weights.
  master = empty_like_this();
  if (initial_.defined()) master.copy_(initial_);
  int64_t row = 0;
  for (const auto& part : parts_) {
    if (initial_.defined()) break;
    at::Tensor rows = sizes_.empty() ? master : master.narrow(0, row, part.rows);
    if (initializer_) {
      auto generator = at::detail::createCPUGenerator(seed_of(seed, part.name));
      initializer_(rows, generator);
    } else if (std_ > 0) {
      auto generator = at::detail::createCPUGenerator(seed_of(seed, part.name));
      if (rows.is_contiguous()) {
        rows.normal_(0.0, std_, generator);
      } else {  // the values do not depend on the order in memory
        rows.copy_(at::empty(rows.sizes(), rows.options()).normal_(0.0, std_, generator));
      }
    } else {
      rows.fill_(fill_);
    }
    row += part.rows;
  }
  value = master.to(dtype_);  // the same tensor if it has that dtype
  if (!trainable_ && !keeps_master_) master = value;
}

void Parameter::allocate_grad() {
  has_grad_ = false;
  if (!trainable_) return;
  if (share_.of == 1) {
    grad = empty_like_this();
    return;
  }
  std::vector<int64_t> sizes = sizes_;
  sizes.insert(sizes.begin(), share_.of);
  grad_by_source = at::empty(sizes, at::TensorOptions().dtype(compute_type(dtype_)));
  grad = grad_by_source[0];
}

void Parameter::stream_grad() {
  streams_grad_ = true;
  forget_grad();
}

void Parameter::forget_grad() {
  has_grad_ = joined_ = false;
  rows_.clear();
  if (!streams_grad_) return;
  grad.reset();
  grad_by_source.reset();
}

at::Tensor& Parameter::grad_memory() {
  if (!grad.defined()) allocate_grad();
  return grad;
}

void Parameter::move_to(at::Device device) {
  if (device == value.device()) return;
  const bool one = value.is_same(master);
  master = master.to(device);
  value = one ? master : value.to(device);
  if (grad.defined()) allocate_grad();
}

at::Tensor Parameter::empty_like_this() const {
  const auto options =
      at::TensorOptions().dtype(compute_type(dtype_)).device(value.defined() ? value.device() : at::kCPU);
  const auto order = channels_last_ ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
  return at::empty(sizes_, options.memory_format(order));
}

void Parameter::tie_to(Parameter& first) {
  is_tied_ = true;
  master = first.master;
  if (first.value.scalar_type() == value.scalar_type()) {
    value = first.value;
  } else if (value.scalar_type() == master.scalar_type()) {
    value = master;
  } else {
    value.copy_(master);
    first.tied_.push_back(this);
  }
}

void Parameter::share_grad(const Parameter& other) {
  shares_grad_ = true;
  grad = other.grad;
}

void Parameter::join_grad() {
  if (apart_.defined()) {
    if (has_grad_) grad.add_(apart_);
    if (!keeps_table_) {
      apart_.reset();
      apart_ = empty_like_this();
      keeps_table_ = true;
    }
  } else if (!rows_.empty()) {
    std::vector<at::Tensor> ids;
    std::vector<at::Tensor> rows;
    for (const auto& [at, from] : rows_) {
      ids.push_back(at);
      rows.push_back(from);
    }
    // The sum of each row first, so that its bits are those of a table.
    const auto [places, place] = at::_unique(at::cat(ids), /*sorted=*/true, /*return_inverse=*/true);
    at::Tensor sums = at::zeros({places.numel(), sizes_[1]}, grad.options());
    operators::add_rows_at(sums, place, at::cat(rows));
    operators::add_rows_at(grad, places, sums);
    rows_.clear();
  }
  has_grad_ = joined_ = true;
}

at::Tensor& Parameter::table() {
  if (!shares_grad_ || joined_) return grad_memory();
  if (!apart_.defined()) apart_ = empty_like_this();
  if (!rows_.empty()) {
    apart_.zero_();
    for (const auto& [ids, rows] : rows_) operators::add_rows_at(apart_, ids, rows);
    rows_.clear();
  }
  return apart_;
}

void Parameter::refresh_value() {
  if (!value.is_same(master)) value.copy_(master);
  for (Parameter* other : tied_) other->refresh_value();
}

void Parameter::accumulate_product(const at::Tensor& a, const at::Tensor& b) {
  if (!discards_) write_product(as_matrix_of_rows(table()), a, b, std::exchange(has_grad_, true));
}

void Parameter::accumulate(const at::Tensor& gradient) {
  if (discards_) return;
  at::Tensor& to = table();
  if (has_grad_) {
    to.add_(gradient);
  } else {
    to.copy_(gradient);
    has_grad_ = true;
  }
}

std::pair<at::Tensor, bool> Parameter::grad_to_write() {
  if (discards_) return {grad_to_add(), true};
  return {table(), std::exchange(has_grad_, true)};
}

std::pair<at::Tensor, bool> Parameter::grad_by_source_to_write() {
  if (share_.of == 1) return grad_to_write();
  grad_memory();
  TWOBP_CHECK(!discards_, name(), " is held by several replicas, so its gradient cannot be computed twice");
  return {grad_by_source.flatten(0, 1), std::exchange(has_grad_, true)};
}

void Parameter::accumulate_rows(const at::Tensor& ids, const at::Tensor& rows) {
  if (discards_) return;
  int64_t known = ids.numel();
  for (const auto& [at, from] : rows_) known += at.numel();
  if (shares_grad_ && !apart_.defined() && known < sizes_[0]) {
    rows_.emplace_back(ids, rows);
    has_grad_ = true;
  } else {
    operators::add_rows_at(grad_to_add(), ids, rows);
  }
}

at::Tensor& Parameter::grad_to_add() {
  if (discards_) {
    if (!discarded_.defined()) discarded_ = empty_like_this().zero_();
    return discarded_;
  }
  at::Tensor& to = table();
  if (!has_grad_) {
    (grad_by_source.defined() ? grad_by_source : to).zero_();
    has_grad_ = true;
  }
  return to;
}

void Parameter::discard_gradients(bool discard) {
  discards_ = discard;
  if (!discard) discarded_.reset();
}

}  // namespace twobp
