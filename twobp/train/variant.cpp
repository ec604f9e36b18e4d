#include "twobp/train/variant.h"

#include <algorithm>
#include <cmath>

#include "twobp/core/check.h"
#include "twobp/pipeline/memory/byte_cap.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/profile/profile.h"
#include "twobp/schedule/simulate/in_process.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp {

bool reorders(const Variant& variant) {
  const Schedule* written = variant.schedule.written();  // named schedules never reorder
  return written != nullptr && written->allow_reorder;
}

StepPlan make_plan(const Pipeline& pipeline, const Variant& variant, int micro_batches, P2Order p2_order) {
  return pipeline.plan(variant.schedule, micro_batches, variant.policy,
                       {variant.batching, variant.memory_cap, p2_order, variant.standard_peaks});
}

std::string warning_of_cap(const Pipeline& pipeline, const Variant& variant, int micro_batches) {
  if (variant.memory_cap.is_automatic() || variant.memory_cap.bytes() == 0) return "";
  const StepPlan plan = make_plan(pipeline, variant, micro_batches);
  const std::vector<double> caps =
      smallest_caps(plan.schedule, profiled_costs(pipeline.layer_costs()), in_process_simulation());
  const int64_t least = std::llround(*std::max_element(caps.begin(), caps.end()));
  if (least <= variant.memory_cap.bytes()) return "";
  return concat("pipeline.memory_cap is ", variant.memory_cap.bytes(), " bytes, but the fullest rank of ",
                variant.schedule.name(), " needs ", least,
                " for activations and stash, so the run exceeds the cap: raise the cap to that, or find a "
                "schedule that needs less with pipeline.schedule = \"auto\" or 'twobp plan --memory'");
}

}  // namespace twobp
