#include "twobp/pipeline/gradient_reducer.h"

#include <algorithm>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/core/wait.h"
#include "twobp/pipeline/memory/memory_meter.h"

namespace twobp {
namespace {

// Alignment of a gradient within a bucket. It is that of a tensor of its own, because the bits of some matrix products
// depend on it.
constexpr int64_t kBucketAlignment = 64;  // bytes

int64_t padded(int64_t bytes) {
  return (bytes + kBucketAlignment - 1) / kBucketAlignment * kBucketAlignment;
}

// Adds numbers of `flat` to the part of their owner.
void add_to_parts(GradientReducer::Bucket& bucket, int owner, int64_t at, int64_t count) {
  if (bucket.owners.empty() || bucket.owners.back() != owner) {
    bucket.owners.push_back(owner);
    bucket.parts.push_back(bucket.flat.narrow(0, at, count));
    return;
  }
  at::Tensor& part = bucket.parts.back();
  part = bucket.flat.narrow(0, part.storage_offset() - bucket.flat.storage_offset(), part.numel() + count);
}

// The same of a gradient, which has `size` numbers with its padding. That goes to the last owner.
void add_to_parts(GradientReducer::Bucket& bucket, const std::vector<Cut>& cuts, int64_t at, int64_t size) {
  for (const Cut& cut : cuts) {
    const int64_t end = cut == cuts.back() ? size : cut.end;
    add_to_parts(bucket, cut.owner, at + cut.begin, end - cut.begin);
  }
}

// Makes the bucket's gradients parts of one tensor. Padding is zero and stays so.
void lay_out(GradientReducer::Bucket& bucket) {
  const MemoryMeter::Scope scope(bucket.stage, MemoryCategory::kGradients);
  if (bucket.items.size() == 1) {
    // In memory order: a convolution's channels come last there.
    const at::Tensor& grad = bucket.items[0].parameter->grad;
    bucket.flat = grad.as_strided({grad.numel()}, {1});
    add_to_parts(bucket, bucket.items[0].cuts, 0, grad.numel());
    return;
  }
  const at::TensorOptions options = bucket.items[0].parameter->grad.options();
  const auto width = static_cast<int64_t>(options.dtype().itemsize());
  int64_t bytes = 0;
  for (const auto& item : bucket.items) bytes += padded(static_cast<int64_t>(item.parameter->grad.nbytes()));
  bucket.flat = at::zeros({bytes / width}, options.memory_format(std::nullopt));
  int64_t at = 0;
  for (const auto& item : bucket.items) {
    at::Tensor& grad = item.parameter->grad;
    const int64_t size = padded(static_cast<int64_t>(grad.nbytes()));
    at::Tensor part = bucket.flat.as_strided(grad.sizes(), grad.strides(), at / width);
    if (item.parameter->has_grad()) part.copy_(grad);
    grad = std::move(part);
    add_to_parts(bucket, item.cuts, at / width, size / width);
    at += size;
  }
}

const at::Storage& streamed_memory(const GradientReducer::Bucket& bucket) {
  const Parameter& parameter = *bucket.items.front().parameter;
  return (bucket.by_source() ? parameter.grad_by_source : parameter.grad).storage();
}

}  // namespace

GradientReducer::GradientReducer(Transport& replicas, std::vector<Item> items, int64_t bucket_bytes, Device device,
                                 Transport* holders)
    : replicas_(replicas), holders_(holders), device_(std::move(device)), bucket_bytes_(bucket_bytes) {
  TWOBP_CHECK(bucket_bytes > 0, "a gradient bucket has ", bucket_bytes, " bytes, but needs more than 0");
  // Last layer first. Within a layer, in the order in which p1 meets the parameters, from its end.
  std::reverse(items.begin(), items.end());
  std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
    return std::pair(a.stage, a.layer) > std::pair(b.stage, b.layer);
  });
  int64_t bytes = bucket_bytes;
  for (Item& item : items) {
    const at::Tensor& grad = item.parameter->grad;
    const bool streams = item.parameter->streams_grad();
    const bool by_source = item.parameter->share().of > 1;
    TWOBP_CHECK(!by_source || holders_ != nullptr, "parameter ", item.parameter->name(),
                " has a gradient by source, but no replicas are given that hold it");
    TWOBP_CHECK(item.parameter->trainable() && (streams || (grad.defined() && grad.is_non_overlapping_and_dense())),
                "parameter ", item.parameter->name(),
                " cannot be in a gradient bucket: it must be trainable, with an allocated dense gradient");
    const bool fits = !streams && !by_source && !buckets_.empty() && !buckets_.back().streams() &&
                      !buckets_.back().by_source() && bytes < bucket_bytes && buckets_.back().stage == item.stage &&
                      buckets_.back().items[0].parameter->grad.scalar_type() == grad.scalar_type();
    if (!fits) {
      bytes = 0;
      buckets_.emplace_back().stage = item.stage;
    }
    bytes += streams ? 0 : static_cast<int64_t>(grad.nbytes());
    Bucket& bucket = buckets_.back();
    if (bucket.layers.empty() || bucket.layers.back() != item.layer) bucket.layers.push_back(item.layer);
    bucket.items.push_back(std::move(item));
  }
  for (Bucket& bucket : buckets_) {
    if (!bucket.streams() && !bucket.by_source()) lay_out(bucket);
  }
  start();
}

void GradientReducer::start() {
  running_.clear();
  made_.clear();
  in_sums_.clear();
  summed_.clear();
  next_ = 0;
  for (Bucket& bucket : buckets_) bucket.layers_left = static_cast<int>(bucket.layers.size());
}

void GradientReducer::layer_done(int stage, int layer) {
  for (size_t b = next_; b < buckets_.size(); ++b) {  // a large layer may have several buckets
    Bucket& bucket = buckets_[b];
    if (bucket.stage != stage) continue;
    if (std::find(bucket.layers.begin(), bucket.layers.end(), layer) != bucket.layers.end()) --bucket.layers_left;
  }
  note_made(/*all=*/false);
  start_ready();
}

void GradientReducer::gradient_done(const Parameter& parameter) {
  for (size_t b = next_; b < buckets_.size(); ++b) {
    if (buckets_[b].streams() && buckets_[b].items.front().parameter == &parameter) buckets_[b].layers_left = 0;
  }
  note_made(/*all=*/false);
  start_ready();
}

void GradientReducer::note_made(bool all) {
  for (size_t b = next_ + made_.size(); b < buckets_.size(); ++b) {
    if (buckets_[b].layers_left > 0 && !(all && has_room())) return;
    const MemoryMeter::Scope scope(buckets_[b].stage, MemoryCategory::kGradients);
    for (const Item& item : buckets_[b].items) item.parameter->grad_to_add();
    made_.push_back(device_.compute().record());
  }
}

void GradientReducer::start_ready() {
  while (!made_.empty() && made_.front().passed()) start_next();
}

void GradientReducer::start_next() {
  Bucket& bucket = buckets_[next_];
  const MemoryMeter::Scope scope(bucket.stage, MemoryCategory::kGradients);
  const OnStream here(device_.sums());
  made_.pop_front();
  if (bucket.streams() && !bucket.by_source()) lay_out(bucket);
  const int number = static_cast<int>(next_) + 1;
  const at::Tensor& terms = bucket.items.front().parameter->grad_by_source;
  if (bucket.streams()) {
    const at::Storage& memory = streamed_memory(bucket);
    in_sums_.push_back({next_, memory.getWeakStorageImpl(), static_cast<int64_t>(memory.nbytes())});
    largest_ = std::max(largest_, in_sums_.back().bytes);
  }
  if (bucket.by_source()) {
    running_.push_back({next_, std::make_unique<AllReduceOfTerms>(*holders_, terms, number)});
  } else if (bucket.owners.empty()) {
    running_.push_back({next_, std::make_unique<AllReduce>(replicas_, bucket.flat, number)});
  } else {
    running_.push_back({next_, std::make_unique<ReduceScatter>(replicas_, bucket.parts, bucket.owners, number)});
  }
  ++next_;
}

std::vector<Parameter*> GradientReducer::take_summed() {
  if (!summed_.empty()) device_.compute().wait(device_.sums().record());
  return std::exchange(summed_, {});
}

void GradientReducer::progress() {
  start_ready();
  if (running_.empty()) return;
  const OnStream here(device_.sums());
  for (Running& running : running_) {
    const MemoryMeter::Scope scope(buckets_[running.bucket].stage, MemoryCategory::kGradients);
    running.done = running.sum->ready();
    if (!running.done) continue;
    Bucket& bucket = buckets_[running.bucket];
    if (!bucket.streams()) continue;
    bucket.flat.reset();
    bucket.parts.clear();
    bucket.owners.clear();
    summed_.push_back(bucket.items.front().parameter);
  }
  std::erase_if(running_, [](const Running& running) { return running.done; });
}

class GradientReducer::AllSums : public Wait {
 public:
  explicit AllSums(GradientReducer& reducer) : reducer_(reducer) {}
  WaitCause cause() const override { return WaitCause::kGradients; }
  bool ready() override {
    reducer_.note_made(/*all=*/true);
    reducer_.progress();
    return reducer_.next_ == reducer_.buckets_.size() && !reducer_.busy();
  }
  size_t progress() const override { return 2 * reducer_.next_ - reducer_.running_.size(); }  // begun and ended
  [[noreturn]] void fail(double timeout) const override {
    const auto& running = reducer_.running_;
    const auto& in_sums = reducer_.in_sums_;
    TWOBP_CHECK(!running.empty() || !in_sums.empty(), "the gradients of ", reducer_.describe(reducer_.next_),
                " were not computed within ", timeout, " s");
    reducer_.fail_to_sum(running.empty() ? in_sums.front().bucket : running.front().bucket, timeout);
  }

 private:
  GradientReducer& reducer_;
};

class GradientReducer::Room : public Wait {
 public:
  explicit Room(GradientReducer& reducer) : reducer_(reducer) {}
  WaitCause cause() const override { return WaitCause::kGradients; }
  bool ready() override {
    reducer_.progress();
    reducer_.replicas_.unsent_to();  // throws Aborted, also if this replica awaits no sum
    return reducer_.has_room();
  }
  size_t progress() const override { return reducer_.next_ - reducer_.in_sums_.size(); }  // those that are gone
  [[noreturn]] void fail(double timeout) const override {
    reducer_.fail_to_sum(reducer_.in_sums_.front().bucket, timeout);
  }

 private:
  GradientReducer& reducer_;
};

bool GradientReducer::has_room() {
  std::erase_if(in_sums_, [](const InSum& one) { return one.memory.expired(); });
  int64_t bytes = 0;
  for (const InSum& one : in_sums_) bytes += one.bytes;
  for (size_t b = next_; b < next_ + made_.size(); ++b) bytes += streamed_memory(buckets_[b]).nbytes();
  return bytes <= std::max(bucket_bytes_, 3 * largest_);
}

std::unique_ptr<Wait> GradientReducer::room() {
  return std::make_unique<Room>(*this);
}

void GradientReducer::fail_to_sum(size_t bucket, double timeout) const {
  std::string missing;
  try {
    if (!running_.empty()) running_.front().sum->fail(timeout);
  } catch (const Error& error) {
    missing = concat(": ", error.what());
  }
  twobp::fail("the gradients of ", describe(bucket), " were not summed over replicas within ", timeout, " s", missing);
}

void GradientReducer::finish(const Patience& patience, const std::function<void()>& meanwhile) {
  AllSums sums(*this);
  wait_for(sums, patience, [&] {
    if (meanwhile) meanwhile();
    return false;
  });
  device_.compute().wait(device_.sums().record());
  replicas_.flush(patience.timeout);  // here, so that the meter sees the release of sent messages
}

std::string GradientReducer::describe(size_t bucket) const {
  const auto& items = buckets_[bucket].items;
  if (items.front().name == items.back().name) return "layer " + items.front().name;
  return "layers " + items.back().name + " to " + items.front().name;
}

}  // namespace twobp
