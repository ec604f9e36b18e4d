#include "twobp/train/run_ahead.h"

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/profile/profile.h"
#include "twobp/schedule/simulate/in_process.h"
#include "twobp/schedule/simulate/step_periods.h"
#include "twobp/transport/collectives.h"
#include "twobp/transport/world.h"

namespace twobp {

RunAhead decide_run_ahead(const Config& config, Pipeline& pipeline, const StepPlan& plan, bool ties_ranks,
                          const std::vector<double>& batch) {
  RunAhead decision;
  if (config.pipeline.run_ahead == "off" || pipeline.ranks() == 1) return decision;
  const bool needs_norm = config.train.clip_norm > 0 || config.train.precision == "fp16";
  // Replicas that share the optimizer's state exchange weights at the end of every step.
  const bool shards = config.optimizer.shard && config.pipeline.data_parallel > 1;
  if (!ties_ranks && !(needs_norm && shards)) {
    const NormNeed norm = needs_norm ? NormNeed::kAfterForwards : NormNeed::kNone;
    decision.gain = step_periods(plan.schedule, profiled_costs(pipeline.layer_costs(), batch),
                                 in_process_simulation(plan.caps), norm)
                        .gain();
  }
  decision.on = config.pipeline.run_ahead == "on" || (!config.pipeline.graphs && decision.gain > RunAhead::kLeastGain);
  World& world = pipeline.world();
  if (world.processes->size() > 1) {
    at::Tensor first = at::zeros({2}, at::kDouble);
    auto* values = first.mutable_data_ptr<double>();
    values[0] = decision.on ? 1 : 0;
    values[1] = decision.gain;
    broadcast(*world.processes, first, 0, config.pipeline.timeout);
    decision.on = first.const_data_ptr<double>()[0] > 0;
    decision.gain = first.const_data_ptr<double>()[1];
  }
  decision.presumes = decision.on && needs_norm && !shards;
  return decision;
}

std::string to_text(const RunAhead& run_ahead) {
  const std::string gain = fixed(run_ahead.gain, 2);
  return run_ahead.on
             ? concat("ranks begin the next step without waiting for each other (simulated: ", gain, "x as fast)")
             : concat("ranks wait for each other at the end of a step (simulated: ", gain,
                      "x as fast if they did not)");
}

}  // namespace twobp
