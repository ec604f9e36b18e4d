#include "twobp/pipeline/memory/memory_meter.h"
#include "twobp/train/update/rank_update.h"

namespace twobp {

WeightAverage::WeightAverage(double decay, const std::vector<Optimizer::Item>& items) : decay_(decay), items_(items) {
  for (const Optimizer::Item& item : items_) {
    const MemoryMeter::Scope scope(item.stage, MemoryCategory::kOptimizer);
    means_.push_back(at::zeros_like(item.parameter->master));
  }
}

void WeightAverage::add(int64_t step) {
  for (size_t i = 0; i < means_.size(); ++i) {
    const at::Tensor& weights = items_[i].parameter->master;
    step == 1 ? means_[i].copy_(weights) : means_[i].lerp_(weights, 1 - decay_);
  }
}

void WeightAverage::swap() {
  for (size_t i = 0; i < means_.size(); ++i) {
    Parameter& parameter = *items_[i].parameter;
    const at::Tensor weights = parameter.master.clone();
    parameter.master.copy_(means_[i]);
    means_[i].copy_(weights);
    parameter.refresh_value();
  }
}

void WeightAverage::add_to(Savepoint& savepoint) const {
  for (size_t i = 0; i < means_.size(); ++i) savepoint.add(means_[i], items_[i].stage);
}

std::vector<Optimizer::State> WeightAverage::state() const {
  std::vector<Optimizer::State> all;
  for (size_t i = 0; i < means_.size(); ++i) all.push_back({items_[i].parameter, "average", means_[i]});
  return all;
}

void Savepoint::add(const at::Tensor& live, int stage) {
  const MemoryMeter::Scope scope(stage, MemoryCategory::kOptimizer);
  entries_.push_back({live, at::empty_like(live)});
}

void Savepoint::save() {
  for (Entry& entry : entries_) entry.copy.copy_(entry.live);
}

void Savepoint::roll_back() const {
  for (const Entry& entry : entries_) entry.live.copy_(entry.copy);
}

}  // namespace twobp
