#include "twobp/train/variant.h"

namespace twobp {

bool reorders(const Variant& variant) {
  const Schedule* written = variant.schedule.written();  // named ones never do
  return written != nullptr && written->allow_reorder;
}

Plan make_plan(const Pipeline& pipeline, const Variant& variant, int micro_batches) {
  Plan plan =
      pipeline.plan(variant.schedule, micro_batches, variant.policy, variant.batching, variant.memory_cap);
  if (!variant.standard_peaks.empty()) plan.standard_peaks = variant.standard_peaks;
  return plan;
}

}  // namespace twobp
