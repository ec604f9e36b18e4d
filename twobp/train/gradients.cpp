#include "twobp/train/gradients.h"

#include <algorithm>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/profile/profile.h"
#include "twobp/pipeline/step_plan.h"
#include "twobp/schedule/simulate/for_training.h"
#include "twobp/schedule/simulate/simulate.h"
#include "twobp/train/config.h"
#include "twobp/transport/world.h"

namespace twobp {
namespace {

constexpr double kMostSlower = 1.02;   // simulated seconds of a step, relative to kept gradients
constexpr double kLeastSaving = 0.99;  // bytes of the fullest rank, likewise

// A step as simulated.
struct Simulated {
  double seconds = 0;
  std::vector<double> bytes;  // by rank, everything included

  size_t fullest() const { return static_cast<size_t>(std::max_element(bytes.begin(), bytes.end()) - bytes.begin()); }
};

class Simulator {
 public:
  Simulator(const Pipeline& pipeline, const StepPlan& kept, const std::vector<double>& batch)
      : pipeline_(pipeline),
        kept_(kept),
        costs_(profiled_costs(pipeline.layer_costs(), batch)),
        fixed_(pipeline.fixed_bytes()) {}

  Simulated run(const std::vector<bool>& streams) const {
    SimulationOptions options = simulation_of(kept_);
    options.streams = streams;
    options.data_parallel.replicas = pipeline_.world().replicas;  // the order of W goes by it
    Simulated result;
    result.bytes.assign(fixed_.begin(), fixed_.end());
    for (size_t stage = 0; stage < streams.size(); ++stage) {
      if (!streams[stage]) continue;
      const auto rank = static_cast<size_t>(pipeline_.rank_of_stage()[stage]);
      options.cap_per_rank[rank] = 0;
      result.bytes[rank] -= streamed_bytes(pipeline_.layer_costs()[stage]).freed;
    }
    const Simulation simulation = simulate(kept_.schedule, costs_, options);
    result.seconds = simulation.step_seconds;
    for (size_t rank = 0; rank < fixed_.size(); ++rank) result.bytes[rank] += simulation.ranks[rank].peak_bytes;
    return result;
  }

 private:
  const Pipeline& pipeline_;
  const StepPlan& kept_;
  std::vector<StageCost> costs_;
  std::vector<int64_t> fixed_;
};

std::string list_of(const std::vector<bool>& stages) {
  std::vector<std::string> names;
  for (size_t stage = 0; stage < stages.size(); ++stage) {
    if (stages[stage]) names.push_back(std::to_string(stage));
  }
  return concat(names.size() == 1 ? "stage " : "stages ", join(names));
}

// Why "auto" keeps gradients that "streamed" would stream.
std::string why_auto_keeps(const Config& config, const StepPlan& kept) {
  if (const std::string why = why_gradients_are_kept(config); !why.empty()) return why;
  if (kept.options.memory_cap.bytes() > 0)
    return "pipeline.memory_cap limits activations and stash, of which streamed gradients take more";
  if (config.pipeline.schedule == "auto") return "the order that pipeline.schedule found is for kept gradients";
  // That W runs at once: earlier than that of micro-batches before it, and in another order than with kept gradients.
  return kept.schedule.has(Op::kBackward) ? "the schedule has whole backward passes (B), whose W does not wait" : "";
}

}  // namespace

std::string why_gradients_are_kept(const Config& config) {
  if (config.train.clip_norm > 0) return "train.clip_norm needs the norm of all gradients before one is applied";
  if (config.train.precision == "fp16") return "fp16 skips a step if one of its gradients overflows";
  if (config.pipeline.experts > 1) return "pipeline.experts keeps a gradient for each member of a group";
  if (config.pipeline.device != "cpu") return concat("pipeline.device is \"", config.pipeline.device, "\"");
  return "";
}

StreamedGradients decide_gradients(const Config& config, const Pipeline& pipeline, const StepPlan& kept,
                                   const std::vector<double>& batch) {
  const auto stages = static_cast<size_t>(pipeline.stages());
  if (config.pipeline.gradients == "kept" || !kept.schedule.has_backward()) return {};
  if (config.pipeline.gradients == "streamed") {
    TWOBP_CHECK(!kept.schedule.has(Op::kBackward), "pipeline.gradients is \"streamed\", but schedule '",
                kept.schedule.name, "' with p2 ", policy_name(kept.schedule.policy),
                " has whole backward passes (B), whose W does not wait. Set pipeline.p2 to \"fill\", or gradients to "
                "\"auto\" or \"kept\".");
    return {std::vector<bool>(stages, true), ""};
  }
  if (const std::string why = why_auto_keeps(config, kept); !why.empty()) return {{}, why};
  const Simulator simulator(pipeline, kept, batch);
  std::vector<bool> streams(stages, false);
  const Simulated first = simulator.run({});
  Simulated best = first;
  while (true) {
    std::vector<bool> more = streams;
    for (size_t stage = 0; stage < stages; ++stage) {
      if (static_cast<size_t>(pipeline.rank_of_stage()[stage]) == best.fullest()) more[stage] = true;
    }
    if (more == streams) break;
    const Simulated next = simulator.run(more);
    if (next.bytes[next.fullest()] > kLeastSaving * best.bytes[best.fullest()]) break;
    if (next.seconds > kMostSlower * first.seconds) break;
    streams = more;
    best = next;
  }
  if (std::ranges::none_of(streams, [](bool streamed) { return streamed; }))
    return {{}, "streaming them lowers no peak, or takes longer"};
  return {streams,
          concat("peak of the fullest rank: ", fixed(best.bytes[best.fullest()] / first.bytes[first.fullest()], 2),
                 "x, time of a step: ", fixed(best.seconds / first.seconds, 2), "x, as simulated")};
}

std::string to_text(const StreamedGradients& gradients) {
  const std::string why = gradients.why.empty() ? "" : concat(" (", gradients.why, ")");
  return gradients.stages.empty() ? concat("gradients are kept until the end of a step", why)
                                  : concat("gradients are streamed by ", list_of(gradients.stages), why);
}

}  // namespace twobp
