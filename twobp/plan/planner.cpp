// Combinations are simulated in the order of the most that each could reach, until no other one can be among
// the best: the result is that of simulating all.
#include "twobp/plan/planner.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/plan/auto_schedule.h"
#include "twobp/plan/candidates.h"
#include "twobp/plan/partition.h"
#include "twobp/plan/recompute_costs.h"
#include "twobp/schedule/named_schedules.h"

namespace twobp {
namespace {

// Most micro-batches between F and I that each stage has at once.
std::vector<int> in_flight(const Schedule& schedule) {
  std::vector<int> now(schedule.stages, 0), most(schedule.stages, 0);
  for (const auto& list : schedule.ranks) {
    for (const Instruction& i : list) {
      if (i.op == Op::kForward) most[i.stage] = std::max(most[i.stage], now[i.stage] += i.count);
      if (i.op == Op::kBackwardP1 || i.op == Op::kBackward) now[i.stage] -= i.count;
    }
  }
  return most;
}

SimulationOptions options_of(const CostModel& model, const Schedule& schedule,
                             const std::vector<StageCost>& costs, double memory) {
  SimulationOptions options = simulation_options(model);
  options.cap_per_rank = caps_for(memory, schedule.rank_of_stage, schedule.rank_count(), costs);
  options.check = false;  // make_schedule has
  return options;
}

bool before(const PlanChoice& a, const PlanChoice& b) {
  const double fast_a = a.samples_per_second();
  const double fast_b = b.samples_per_second();
  if (fast_a != fast_b) return fast_a > fast_b;
  return a.peak_bytes < b.peak_bytes;
}

class Planner {
 public:
  Planner(const CostModel& model, const PlanRequest& request) : request_(request) {
    check_cost_model(model);
    TWOBP_CHECK(std::isfinite(request.memory) && request.memory >= 0, "the memory of a rank is ",
                request.memory, " bytes: must be finite and not negative");
    std::vector<std::string> modes = request.recompute;
    if (modes.empty()) modes = computes_again(model) ? std::vector<std::string>{"none"} : recompute_modes();
    for (const std::string& mode : modes) {
      models_.emplace_back(mode, with_recompute(model, mode));
    }
  }

  PlanResult run() {
    auto all = candidates(models_, request_);
    result_.combinations = static_cast<int64_t>(all.size());
    std::stable_sort(all.begin(), all.end(),
                     [](const auto& a, const auto& b) { return a.most_samples > b.most_samples; });
    auto& best = result_.best;
    const size_t top = request_.top > 0 ? request_.top : all.size();
    for (Candidate& candidate : all) {
      if (best.size() == top && candidate.most_samples < best.back().samples_per_second()) break;
      ++result_.simulated;
      if (!evaluate(candidate)) continue;
      const auto place = std::upper_bound(best.begin(), best.end(), candidate.choice, before);
      best.insert(place, candidate.choice);
      if (best.size() > top) best.pop_back();
    }
    if (best.empty()) {
      find_smallest(all);
    } else {
      give_advice(best.front());
      if (request_.search) search(top);
    }
    return std::move(result_);
  }

 private:
  const CostModel& model_of(const PlanChoice& choice) const {
    const auto at = std::find_if(models_.begin(), models_.end(),
                                 [&](const auto& model) { return model.first == choice.recompute; });
    return at->second;
  }

  // Fills in what the simulation says; false where it does not fit.
  bool evaluate(Candidate& candidate) {
    PlanChoice& choice = candidate.choice;
    if (request_.memory > 0 && least_bytes(choice) > request_.memory * choice.ranks) return false;
    const Schedule schedule = schedule_of(choice);
    simulate_split(choice, schedule);
    if (fits(choice)) return true;
    for (const double within : {request_.memory, 0.0}) {
      PlanChoice lighter = choice;
      if (!split_within(within, lighter, schedule) || lighter.split == choice.split) continue;
      simulate_split(lighter, schedule);
      if (!fits(lighter)) continue;
      choice = lighter;
      return true;
    }
    return false;
  }

  bool fits(const PlanChoice& choice) const {
    return request_.memory <= 0 || choice.peak_bytes <= request_.memory * (1 + 1e-9);
  }

  void simulate_split(PlanChoice& choice, const Schedule& schedule) const {
    const Simulation simulation = simulate_with(choice, schedule, request_.memory);
    choice.step_seconds = simulation.step_seconds;
    choice.bubble = simulation.bubble_ratio();
    choice.peak_bytes = peak_of(simulation);
  }

  Simulation simulate_with(const PlanChoice& choice, const Schedule& schedule, double memory) const {
    const CostModel& model = model_of(choice);
    const auto costs = stage_costs(model, choice.split, choice.micro_batch_size);
    return simulate(schedule, costs, options_of(model, schedule, costs, memory));
  }

  // On all ranks together: what is fixed, and the activations of one micro-batch, which stages of a rank hold
  // at the same time, but for what is sent on.
  double least_bytes(const PlanChoice& choice) {
    const auto [at, is_new] = least_.try_emplace({choice.micro_batch_size, choice.recompute});
    if (is_new) {
      const CostModel& model = model_of(choice);
      const auto layers = layer_costs_at(model, choice.micro_batch_size);
      for (size_t l = 0; l < layers.size(); ++l) {
        at->second.bytes += fixed_bytes(model, l) + layers[l].share.forward_held;
        at->second.output = std::max(at->second.output, layers[l].output);
      }
    }
    return at->second.bytes - choice.stages * at->second.output;
  }

  static double fixed_bytes(const CostModel& model, size_t layer) {
    const KindCosts& kind = model.kinds.at(model.layers[layer].kind);
    return static_cast<int>(layer) >= model.first_trainable ? kind.fixed_bytes() : kind.parameter_bytes;
  }

  // By activations and fixed bytes: what W keeps can be given up early. False where there is no such split.
  // `memory` 0: the split that needs the least.
  bool split_within(double memory, PlanChoice& choice, const Schedule& schedule) {
    auto in_flight_now = in_flight(schedule);
    const auto [at, is_new] = within_.try_emplace(
        {schedule.rank_of_stage, in_flight_now, choice.micro_batch_size, choice.recompute, memory > 0});
    if (is_new) at->second = make_split_within(memory, choice, schedule, std::move(in_flight_now));
    if (!at->second.empty()) choice.split = at->second;
    return !at->second.empty();
  }

  std::vector<int> make_split_within(double memory, const PlanChoice& choice, const Schedule& schedule,
                                     std::vector<int> in_flight_now) const {
    const CostModel& model = model_of(choice);
    PartitionBytes bytes;
    std::vector<double> seconds;
    double peak = 0;  // beside what is held, while a layer runs
    const auto layers = layer_costs_at(model, choice.micro_batch_size);
    for (size_t l = 0; l < layers.size(); ++l) {
      const LayerShare& share = layers[l].share;
      seconds.push_back(layers[l].seconds());
      bytes.fixed.push_back(fixed_bytes(model, l));
      bytes.held.push_back(std::max(0.0, share.forward_held));
      peak = std::max({peak, share.forward_peak - share.forward_held, share.p1_peak, share.p2_peak});
    }
    bytes.in_flight = std::move(in_flight_now);
    if (memory == 0) return lightest_split(bytes, schedule.rank_of_stage);
    if (memory <= peak) return {};
    bytes.caps.assign(schedule.rank_count(), memory - peak);
    try {
      return balanced_split(seconds, schedule.rank_of_stage, bytes);
    } catch (const Error&) {  // no split keeps the caps
      return {};
    }
  }

  // What each combination needs with W as early as it can run, with its own split and with the lightest one,
  // and the least of these.
  void find_smallest(const std::vector<Candidate>& all) {
    for (const Candidate& candidate : all) {
      PlanChoice choice = candidate.choice;
      if (result_.smallest && least_bytes(choice) > result_.smallest->peak_bytes * choice.ranks) continue;
      const Schedule schedule = schedule_of(choice);
      offer_smallest(choice, schedule);
      if (split_within(0, choice, schedule) && choice.split != candidate.choice.split) {
        offer_smallest(choice, schedule);
      }
    }
    PlanChoice& smallest = *result_.smallest;
    const Simulation simulation = simulate_with(smallest, schedule_of(smallest), smallest.peak_bytes);
    smallest.step_seconds = simulation.step_seconds;
    smallest.bubble = simulation.bubble_ratio();
  }

  void offer_smallest(PlanChoice choice, const Schedule& schedule) {
    const CostModel& model = model_of(choice);
    const auto costs = stage_costs(model, choice.split, choice.micro_batch_size);
    auto options = simulation_options(model);
    options.check = false;
    auto needs = smallest_caps(schedule, costs, options);
    for (int s = 0; s < schedule.stages; ++s) needs[schedule.rank_of_stage[s]] += costs[s].fixed_bytes;
    choice.peak_bytes = *std::max_element(needs.begin(), needs.end());
    if (result_.smallest && choice.peak_bytes >= result_.smallest->peak_bytes) return;
    // With more room W runs later, and a message may wait longer with its sender: until what it says does.
    for (int more = 0; more < 8; ++more) {
      const double peak = peak_of(simulate_with(choice, schedule, choice.peak_bytes));
      if (peak <= choice.peak_bytes * (1 + 1e-9)) break;
      choice.peak_bytes = peak;
    }
    if (!result_.smallest || choice.peak_bytes < result_.smallest->peak_bytes) result_.smallest = choice;
  }

  // A search for each way to place the model, and its micro-batches, that is among the best.
  void search(size_t top) {
    std::set<std::tuple<std::vector<int>, std::vector<int>, int, int, std::string>> known;
    const auto named = result_.best;
    for (PlanChoice choice : named) {
      const Schedule schedule = schedule_of(choice);
      if (!known
               .insert({schedule.rank_of_stage, choice.split, choice.micro_batches, choice.micro_batch_size,
                        choice.recompute})
               .second) {
        continue;
      }
      const CostModel& model = model_of(choice);
      const auto costs = stage_costs(model, choice.split, choice.micro_batch_size);
      const SimulationOptions options = options_of(model, schedule, costs, request_.memory);
      const AutoScheduleOptions effort{.effort = SearchEffort::kQuick};
      std::optional<AutoSchedule> searched;
      try {
        searched = auto_schedule(schedule.rank_of_stage, choice.micro_batches, costs, options, effort);
      } catch (const NoScheduleFits&) {
        continue;  // the named row stays; the search found none for its memory
      }
      if (searched->method == "named") continue;
      const double before_search = choice.step_seconds;
      choice.schedule = "auto";
      choice.policy = searched->schedule.policy;
      choice.found = searched->schedule;
      simulate_split(choice, *choice.found);
      if (!fits(choice) || choice.step_seconds >= before_search) continue;
      auto& best = result_.best;
      best.insert(std::upper_bound(best.begin(), best.end(), choice, before), choice);
      if (best.size() > top) best.pop_back();
    }
  }

  void give_advice(const PlanChoice& choice) {
    const CostModel& model = model_of(choice);
    AdviceRequest request;
    request.schedule = choice.schedule;
    request.stages = choice.stages;
    request.ranks = choice.ranks;
    request.micro_batches = choice.micro_batches;
    request.policy = choice.policy == P2Policy::kOff ? default_policy(choice.schedule) : choice.policy;
    request.costs = stage_costs(model, choice.split, choice.micro_batch_size);
    request.options = simulation_options(model);
    request.memory = request_.memory;
    result_.advice = advise(request);
  }

  const PlanRequest& request_;
  std::vector<std::pair<std::string, CostModel>> models_;  // by recomputation
  struct Least {
    double bytes = 0;
    double output = 0;  // the biggest
  };
  std::map<std::pair<int, std::string>, Least> least_;  // by micro-batch size and recomputation
  // Splits within the memory, by placement, micro-batches held, their size and recomputation.
  std::map<std::tuple<std::vector<int>, std::vector<int>, int, std::string, bool>, std::vector<int>> within_;
  PlanResult result_;
};

}  // namespace

Schedule schedule_of(const PlanChoice& choice) {
  if (choice.found) return *choice.found;
  return make_schedule(choice.schedule, choice.stages, choice.micro_batches, choice.policy, choice.ranks);
}

PlanResult plan(const CostModel& model, const PlanRequest& request) {
  return Planner(model, request).run();
}

Simulation simulate_choice(const CostModel& model, const PlanChoice& choice, double memory) {
  const CostModel recomputed = with_recompute(model, choice.recompute);
  const Schedule schedule = schedule_of(choice);
  const auto costs = stage_costs(recomputed, choice.split, choice.micro_batch_size);
  return simulate(schedule, costs, options_of(recomputed, schedule, costs, memory));
}

}  // namespace twobp
