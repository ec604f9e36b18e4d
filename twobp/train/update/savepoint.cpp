#include "twobp/train/update/savepoint.h"

#include "twobp/pipeline/memory/memory_meter.h"

namespace twobp {

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
