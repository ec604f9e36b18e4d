#include "twobp/train/variant.h"

#include "twobp/pipeline/memory/byte_cap.h"
#include "twobp/pipeline/pipeline.h"

namespace twobp {

bool reorders(const Variant& variant) {
  const Schedule* written = variant.schedule.written();  // named schedules never reorder
  return written != nullptr && written->allow_reorder;
}

StepSetup make_setup(const Pipeline& pipeline, const Variant& variant, int micro_batches) {
  StepSetup setup =
      pipeline.setup(variant.schedule, micro_batches, variant.policy, variant.batching, variant.memory_cap);
  if (!variant.standard_peaks.empty()) setup.standard_peaks = variant.standard_peaks;
  return setup;
}

}  // namespace twobp
