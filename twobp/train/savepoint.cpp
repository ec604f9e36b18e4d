#include "twobp/train/savepoint.h"

#include "twobp/pipeline/memory_meter.h"

namespace twobp {

void Savepoint::add(const at::Tensor& live, int stage) {
  entries_.push_back({live, {}, stage});
}

void Savepoint::save() {
  for (Entry& entry : entries_) {
    const MemoryMeter::Scope scope(entry.stage, MemoryCategory::kOptimizer);
    if (!entry.copy.defined()) entry.copy = at::empty_like(entry.live);
    entry.copy.copy_(entry.live);
  }
}

void Savepoint::roll_back() const {
  for (const Entry& entry : entries_) entry.live.copy_(entry.copy);
}

}  // namespace twobp
