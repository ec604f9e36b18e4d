#include "twobp/train/gradients.h"

#include <algorithm>
#include <cmath>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/profile/profile.h"
#include "twobp/pipeline/step_plan.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/simulate/for_training.h"
#include "twobp/schedule/simulate/simulate.h"
#include "twobp/train/config.h"
#include "twobp/train/variant.h"
#include "twobp/transport/world.h"

namespace twobp {
namespace {

constexpr double kMostSlower = 1.02;   // simulated seconds of a step, relative to kept gradients
constexpr double kLeastSaving = 0.99;  // bytes of the fullest rank, likewise

// A step as simulated.
struct Simulated {
  double seconds = 0;
  std::vector<double> bytes;  // by rank, everything included
  double held = 0;            // most activations and stash of a rank

  double most() const { return *std::max_element(bytes.begin(), bytes.end()); }
  size_t fullest() const { return static_cast<size_t>(std::max_element(bytes.begin(), bytes.end()) - bytes.begin()); }
};

struct Way {
  Variant variant;
  std::vector<bool> streams;  // by stage
  Simulated step;
};

class Simulator {
 public:
  Simulator(const Pipeline& pipeline, int micro_batches, const std::vector<double>& batch)
      : pipeline_(pipeline),
        micro_batches_(micro_batches),
        costs_(profiled_costs(pipeline.layer_costs(), batch)),
        fixed_(pipeline.fixed_bytes()) {}

  Simulated run(const Variant& variant, const std::vector<bool>& streams) const {
    const StepPlan kept = make_plan(pipeline_, variant, micro_batches_);
    SimulationOptions options = simulation_of(kept);
    options.streams = streams;
    options.data_parallel.replicas = pipeline_.world().replicas;  // the order of W goes by it
    Simulated result;
    result.bytes.assign(fixed_.begin(), fixed_.end());
    for (size_t stage = 0; stage < streams.size(); ++stage) {
      if (!streams[stage]) continue;
      const auto rank = static_cast<size_t>(pipeline_.rank_of_stage()[stage]);
      if (variant.memory_cap.bytes() == 0) options.cap_per_rank[rank] = 0;  // an automatic one grows by what is freed
      result.bytes[rank] -= streamed_bytes(pipeline_.layer_costs()[stage]).freed;
    }
    const Simulation simulation = simulate(kept.schedule, costs_, options);
    result.seconds = simulation.step_seconds;
    for (size_t rank = 0; rank < fixed_.size(); ++rank) {
      const double held = simulation.ranks[rank].peak_bytes;
      result.held = std::max(result.held, held);
      result.bytes[rank] += held;
    }
    return result;
  }

  // Streams the fullest rank, then also the one that is fullest then, and so on. Returns what lowers the bytes most
  // below those of `first`, in hardly more time, with as few ranks as that takes; without stages if nothing does.
  Way lightest(const Variant& variant, const Simulated& first) const {
    const auto stages = static_cast<size_t>(pipeline_.stages());
    Way best{variant, std::vector<bool>(stages, false), first};
    Way next{variant, best.streams, run(variant, {})};
    while (true) {
      const size_t fullest = next.step.fullest();
      const std::vector<bool> before = next.streams;
      for (size_t stage = 0; stage < stages; ++stage) {
        if (static_cast<size_t>(pipeline_.rank_of_stage()[stage]) == fullest) next.streams[stage] = true;
      }
      if (next.streams == before) next.streams.assign(stages, true);  // which may take less time
      if (next.streams == before) return best;
      next.step = run(variant, next.streams);
      const bool fast = next.step.seconds <= kMostSlower * first.seconds;
      if (fast && next.step.most() <= kLeastSaving * best.step.most()) best = next;
    }
  }

 private:
  const Pipeline& pipeline_;
  int micro_batches_;
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

// The named schedules on this placement, whose W fills waits.
std::vector<Variant> filling(const Pipeline& pipeline, const Variant& like, int micro_batches) {
  std::vector<Variant> variants;
  for (const NamedVariant& named : named_schedules_on(pipeline.rank_of_stage(), micro_batches, pipeline.slices())) {
    if (named.policy != P2Policy::kFill) continue;
    variants.push_back(like);
    variants.back().schedule = named.name;
    variants.back().policy = named.policy;
  }
  return variants;
}

// Names a cap that suffices. With more room, W runs later and more may be held, so the cap is raised until it suffices.
[[noreturn]] void fail_to_fit(const Simulator& simulator, std::vector<Way> ways, int64_t cap) {
  const auto held = [](const Way& way) { return way.step.held; };
  int64_t needed = cap;
  for (int tries = 0; tries < 9; ++tries) {
    const auto least = static_cast<int64_t>(std::ceil(std::ranges::min(ways, {}, held).step.held));
    if (least <= needed) break;
    needed = least;
    for (Way& way : ways) {
      way.variant.memory_cap = MemoryCap(needed);
      way.step = simulator.run(way.variant, way.streams);
    }
  }
  fail("pipeline.memory_cap is ", cap, " bytes, but with streamed gradients the fullest rank needs ", needed,
       " for activations and stash under any schedule: raise the cap to that, or set pipeline.gradients to \"auto\" or "
       "\"kept\"");
}

// Why "auto" keeps gradients that "streamed" would stream.
std::string why_auto_keeps(const Config& config, const StepPlan& kept) {
  if (const std::string why = why_gradients_are_kept(config); !why.empty()) return why;
  if (kept.options.memory_cap.bytes() > 0)
    return "pipeline.memory_cap limits activations and stash, of which streamed gradients take more";
  if (config.pipeline.schedule == kAutoSchedule) return "";
  return kept.schedule.has(Op::kBackward) ? "the schedule has whole backward passes (B), whose W does not wait" : "";
}

}  // namespace

std::string why_gradients_are_kept(const Config& config) {
  if (config.train.clip_norm > 0) return "train.clip_norm needs the norm of all gradients before one is applied";
  if (config.train.precision == "fp16") return "fp16 skips a step if one of its gradients overflows";
  if (config.pipeline.graphs) return "pipeline.graphs records a step without its update";
  if (config.pipeline.device != "cpu" && config.pipeline.gradients != "streamed")
    return concat("pipeline.device is \"", config.pipeline.device, "\", where only \"streamed\" streams");
  return "";
}

StreamedGradients decide_gradients(const Config& config, const Pipeline& pipeline, Variant& variant, int micro_batches,
                                   const std::vector<double>& batch) {
  const std::vector<bool> all(static_cast<size_t>(pipeline.stages()), true);
  const StepPlan kept = make_plan(pipeline, variant, micro_batches);
  if (config.pipeline.gradients == "kept" || !kept.schedule.has_backward()) return {};
  const bool searches = config.pipeline.schedule == kAutoSchedule;
  const bool must = config.pipeline.gradients == "streamed";
  if (must && !searches) {
    TWOBP_CHECK(!kept.schedule.has(Op::kBackward), "pipeline.gradients is \"streamed\", but schedule '",
                kept.schedule.name, "' with p2 ", policy_name(kept.schedule.policy),
                " has whole backward passes (B), whose W does not wait. Set pipeline.p2 to \"fill\", or gradients to "
                "\"auto\" or \"kept\".");
    return {all, ""};
  }
  if (const std::string why = must ? "" : why_auto_keeps(config, kept); !why.empty()) return {{}, why};
  const Simulator simulator(pipeline, micro_batches, batch);
  const Simulated first = simulator.run(variant, {});
  std::vector<Way> ways;
  for (const Variant& one : searches ? filling(pipeline, variant, micro_batches) : std::vector<Variant>{variant}) {
    Way way = must ? Way{one, all, simulator.run(one, all)} : simulator.lightest(one, first);
    if (std::ranges::count(way.streams, true) > 0) ways.push_back(std::move(way));
  }
  if (ways.empty()) return {{}, "streaming them lowers no peak, or takes longer"};
  if (const int64_t cap = variant.memory_cap.bytes(); cap > 0) {
    const auto exceeds = [&](const Way& way) { return way.step.held > static_cast<double>(cap); };
    if (std::ranges::all_of(ways, exceeds)) fail_to_fit(simulator, ways, cap);
    std::erase_if(ways, exceeds);
  }
  double least = ways.front().step.most();
  for (const Way& way : ways) least = std::min(least, way.step.most());
  std::erase_if(ways, [&](const Way& way) { return kLeastSaving * way.step.most() > least; });
  const Way& best = *std::ranges::min_element(ways, {}, [](const Way& way) { return way.step.seconds; });
  variant = best.variant;
  return {best.streams, concat("peak of the fullest rank: ", fixed(best.step.most() / first.most(), 2),
                               "x, time of a step: ", fixed(best.step.seconds / first.seconds, 2), "x, as simulated")};
}

std::string to_text(const StreamedGradients& gradients) {
  const std::string why = gradients.why.empty() ? "" : concat(" (", gradients.why, ")");
  return gradients.stages.empty() ? concat("gradients are kept until the end of a step", why)
                                  : concat("gradients are streamed by ", list_of(gradients.stages), why);
}

}  // namespace twobp
