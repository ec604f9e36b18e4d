#include "twobp/train/replanner.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/core/figures.h"
#include "twobp/core/median.h"
#include "twobp/pipeline/profile/simulated_costs.h"
#include "twobp/schedule/check/in_process.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp {
namespace {

double seconds_of(const StageCost& cost) {
  return cost.forward + cost.backward_p1 + cost.backward_p2;
}

struct Prediction {
  double seconds = 0;         // of the step
  std::vector<double> peaks;  // bytes of activations, stash and messages, by rank
  std::vector<double> caps;   // by rank; 0: none
  int slab_slots = 0;
};

Prediction predict(const Pipeline& pipeline, const Variant& variant, int micro_batches,
                   const std::vector<StageCost>& costs) {
  const Plan plan = make_plan(pipeline, variant, micro_batches);
  const SimulationOptions options = in_process_simulation(pipeline.caps(plan));
  const Simulation simulation = simulate(plan.schedule, costs, options);
  Prediction prediction{simulation.step_seconds, {}, options.cap_per_rank, plan.slab_slots};
  for (const RankSimulation& rank : simulation.ranks) prediction.peaks.push_back(rank.peak_bytes);
  return prediction;
}

// Whether a plan holds no more than the one that the run began with may.
bool fits(const Prediction& plan, const Prediction& began, P2Batching batching) {
  for (size_t r = 0; r < plan.peaks.size(); ++r) {
    if (plan.peaks[r] > std::max(began.caps[r], began.peaks[r])) return false;
  }
  return batching == P2Batching::kLoop || plan.slab_slots <= began.slab_slots;  // slabs are not simulated
}

}  // namespace

std::string to_text(const Replan& replan) {
  const std::string what = concat("stage ", replan.stage, " takes ", percent(std::abs(replan.drift)),
                                  replan.drift > 0 ? " longer" : " less", " than planned: ");
  if (replan.gain <= 0) return concat(what, "no other plan is predicted to be faster");
  return concat(what, replan.variant.schedule, " with p2 ", policy_name(replan.variant.policy),
                " from now on, predicted ", percent(replan.gain), " faster");
}

Replanner::Replanner(double threshold, const Pipeline& pipeline, int micro_batches, Variant began)
    : threshold_(threshold), pipeline_(pipeline), micro_batches_(micro_batches), began_(std::move(began)) {
  TWOBP_CHECK(threshold > 0, "the drift that calls for a new plan must be above 0, got ", threshold);
  began_.standard_peaks = make_plan(pipeline, began_, micro_batches).standard_peaks;
  for (const StageCost& cost : stage_costs(pipeline.stage_costs())) planned_.push_back(seconds_of(cost));
}

std::optional<Replan> Replanner::after_step(const StepReport& report, const Variant& now) {
  if (report.stages.front().micro_batches != micro_batches_) return std::nullopt;  // the rest of an epoch
  if (reorders(now)) return std::nullopt;
  measured_.push_back(measured_costs(pipeline_.stage_costs(), pipeline_.rank_of_stage(), report));
  if (measured_.size() > kWindow) measured_.pop_front();
  if (measured_.size() < kWindow) return std::nullopt;
  const std::vector<StageCost> costs = medians();
  double drift = 0;
  int stage = 0;
  for (size_t s = 0; s < costs.size(); ++s) {
    if (planned_[s] <= 0) continue;  // nothing to compare with
    const double of_stage = seconds_of(costs[s]) / planned_[s] - 1;
    if (std::abs(of_stage) <= std::abs(drift)) continue;
    drift = of_stage;
    stage = static_cast<int>(s);
  }
  if (std::abs(drift) <= threshold_) return std::nullopt;
  Replan replan = best_plan(costs, now);
  replan.drift = drift;
  replan.stage = stage;
  for (size_t s = 0; s < costs.size(); ++s) planned_[s] = seconds_of(costs[s]);
  measured_.clear();
  return replan;
}

std::string Replanner::written(const std::optional<Replan>& replan) {
  if (!replan) return "";
  return nlohmann::json({{"schedule", replan->variant.schedule.name()},
                         {"p2", policy_name(replan->variant.policy)},
                         {"drift", replan->drift},
                         {"stage", replan->stage},
                         {"gain", replan->gain}})
      .dump();
}

std::optional<Replan> Replanner::read(const std::string& text, const Variant& now) const {
  if (text.empty()) return std::nullopt;
  const auto json = nlohmann::json::parse(text);
  const auto schedule = json.at("schedule").get<std::string>();
  const P2Policy policy = parse_policy(json.at("p2").get<std::string>());
  Replan replan{now, json.at("drift"), json.at("stage"), json.at("gain")};
  const auto is = [&](const Variant& variant) {
    return variant.schedule.name() == schedule && variant.policy == policy;
  };
  if (is(now)) return replan;
  replan.variant = began_;
  if (is(began_)) return replan;
  replan.variant.schedule = schedule;
  replan.variant.policy = policy;
  return replan;
}

std::vector<StageCost> Replanner::medians() const {
  std::vector<StageCost> costs = measured_.front();
  for (size_t s = 0; s < costs.size(); ++s) {
    for (double StageCost::*part :
         {&StageCost::forward, &StageCost::backward_p1, &StageCost::backward_p2, &StageCost::optimizer}) {
      std::vector<double> values;
      for (const auto& step : measured_) values.push_back(step[s].*part);
      costs[s].*part = median(values);
    }
  }
  return costs;
}

Replan Replanner::best_plan(const std::vector<StageCost>& costs, const Variant& now) const {
  const Prediction began = predict(pipeline_, began_, micro_batches_, costs);
  const double before = predict(pipeline_, now, micro_batches_, costs).seconds;
  Replan best{now};
  double least = before / (1 + kLeastGain);
  const auto consider = [&](const Variant& variant, const Prediction& prediction) {
    if (prediction.seconds >= least || !fits(prediction, began, variant.batching)) return;
    least = prediction.seconds;
    best.variant = variant;
    best.gain = before / prediction.seconds - 1;
  };
  consider(began_, began);  // named schedules do not have one that was written
  for (const NamedVariant& named : named_schedules_on(pipeline_.rank_of_stage(), micro_batches_)) {
    Variant variant = began_;  // its batching and its cap
    variant.schedule = named.name;
    variant.policy = named.policy;
    consider(variant, predict(pipeline_, variant, micro_batches_, costs));
  }
  return best;
}

}  // namespace twobp
