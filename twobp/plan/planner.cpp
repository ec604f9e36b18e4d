// Combinations are simulated in the order of the most that each could reach. This ends when no other one can
// be among the best. Combinations whose activations alone exceed the memory are skipped. The result is the
// same as that of simulating all.
#include "twobp/plan/planner.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/core/recompute_mode.h"
#include "twobp/core/text.h"
#include "twobp/plan/auto_schedule/auto_schedule.h"
#include "twobp/plan/candidates.h"
#include "twobp/plan/cost_model.h"
#include "twobp/plan/memory/least_memory.h"
#include "twobp/plan/memory/stage_bytes.h"
#include "twobp/plan/partition/partition.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/simulate/for_training.h"

namespace twobp {
namespace {

// Replicas that share experts follow each other, as do the ranks of a replica. Of what one of them sends in an
// exchange, only the part for members in other nodes takes the link out of its node.
LinkSpeed exchange_link(const PlanChoice& choice, const Interconnect& network, const LinkSpeed& near,
                        const LinkSpeed& far) {
  const bool whole = network.ranks_per_node > 0 && network.ranks_per_node % choice.ranks == 0;
  const int in_node = whole ? std::gcd(choice.experts, network.ranks_per_node / choice.ranks) : 1;  // of a group
  if (in_node == choice.experts) return near;
  return {far.latency, far.bytes_per_second * (choice.experts - 1) / (choice.experts - in_node)};
}

SimulationOptions options_of(const CostModel& model, const PlanChoice& choice, const Schedule& schedule,
                             const std::vector<StageCost>& costs, const PlanRequest& request) {
  const Interconnect& network = request.interconnect;
  SimulationOptions options = simulation_options(model);
  const LinkSpeed link = network.link.value_or(LinkSpeed{model.link_latency, model.link_bytes_per_second});
  const LinkSpeed node = network.node.value_or(link);
  options.message_seconds = link.latency;
  options.bytes_per_second = link.bytes_per_second;
  if (network.ranks_per_node > 0) {
    options.shared_links = node_links(choice.ranks, network.ranks_per_node, node.latency, node.bytes_per_second);
  }
  const LinkSpeed data = network.data.value_or(node);
  // As in training by default: in buckets, and W in their order.
  options.data_parallel = {.replicas = choice.data_parallel,
                           .latency = data.latency,
                           .bytes_per_second = data.bytes_per_second,
                           .bucket_bytes = network.bucket_bytes};
  if (choice.experts > 1) {
    const LinkSpeed exchange = exchange_link(choice, network, link, data);
    options.data_parallel.experts = choice.experts;
    options.data_parallel.exchange_latency = exchange.latency;
    options.data_parallel.exchange_bytes_per_second = exchange.bytes_per_second;
  }
  if (choice.data_parallel > 1) options.p2_order = P2Order::kBucket;
  if (choice.streams) options.streams.assign(static_cast<size_t>(choice.stages), true);
  options.cap_per_rank = caps_for(request.memory, schedule.rank_of_stage, schedule.rank_count(),
                                  choice.streams ? without_gradients(costs) : costs);
  options.check = false;  // make_schedule has validated it
  options.ahead = forwards_ahead(schedule, costs, options, choice.ranks);
  return options;
}

std::vector<StageCost> costs_of(const CostModel& model, const PlanChoice& choice, const std::vector<int>& rank_of_stage,
                                bool one_memory) {
  return costs_of_micro_batches(
      stage_costs(model, choice.split, choice.micro_batch_size, choice.slices,
                  {rank_of_stage, choice.data_parallel, one_memory}),
      typical_batch(model.sample_costs, {choice.data_parallel, choice.micro_batches, choice.micro_batch_size}));
}

class Planner {
 public:
  Planner(const CostModel& model, const PlanRequest& request) : request_(request) {
    check_cost_model(model);
    TWOBP_CHECK(std::isfinite(request.memory) && request.memory >= 0, "the memory of a rank is ", request.memory,
                " bytes: must be finite and not negative");
    std::vector<std::string> modes = request.recompute;
    if (modes.empty()) modes = computes_again(model) ? std::vector<std::string>{"none"} : recompute_names();
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
    const size_t kept = std::max(top, kCompared);
    for (Candidate& candidate : all) {
      if (best.size() == kept && candidate.most_samples < best.back().samples_per_second()) break;
      if (evaluate(candidate)) insert_by_speed(best, candidate.choice, kept);
    }
    if (best.empty()) {
      find_smallest(all);
      return std::move(result_);
    }
    if (request_.search) search_splits(kept);
    const auto named = shown(best, top);
    if (request_.search) search_schedules(named, kept);
    best = shown(best, top);
    compare_with_off(best.front().found ? named.front() : best.front());
    return std::move(result_);
  }

 private:
  // The most simulated ops, in total, in the search for a row's split.
  static constexpr double kSearchedOps = 3e5;
  static constexpr double kLeastGain = 1.02;  // by which a step with frozen stages must be faster

  static std::vector<PlanChoice> shown(std::vector<PlanChoice> best, size_t top) {
    const auto first = lightest_of_fastest(best);
    std::rotate(best.begin(), first, first + 1);
    best.resize(std::min(best.size(), top));
    return best;
  }

  // Fills in the results of the simulation. Returns false if it does not fit.
  bool evaluate(Candidate& candidate) {
    PlanChoice with = candidate.choice;
    const bool fitted = evaluate_as_it_is(candidate);
    if (!add_frozen_stages(with)) return fitted;
    ++result_.simulated;
    simulate_split(with, schedule_of(with));
    if (!fits(with) || (fitted && candidate.choice.step_seconds <= kLeastGain * with.step_seconds)) return fitted;
    candidate.choice = std::move(with);
    return true;
  }

  // Returns false if the choice has none.
  bool add_frozen_stages(PlanChoice& choice) const {
    const CostModel& model = model_for(models_, choice);
    const int first = model.first_trainable;
    if (!can_have_frozen_stages(choice.schedule, choice.ranks, choice.stages, first,
                                static_cast<int>(model.layers.size())))
      return false;
    const std::vector<double> seconds = layer_seconds_at(model, choice.micro_batch_size, choice.slices);
    choice.split = balanced_split({seconds.begin(), seconds.begin() + first},
                                  place_stages(Placement::kLinear, choice.ranks, choice.ranks));
    for (const int count : balanced_split({seconds.begin() + first, seconds.end()},
                                          choice.schedule.rank_of_stage(choice.stages, choice.ranks)))
      choice.split.push_back(count);
    choice.frozen_stages = choice.ranks;
    choice.stages += choice.ranks;
    return true;
  }

  bool evaluate_as_it_is(Candidate& candidate) {
    PlanChoice& choice = candidate.choice;
    if (request_.memory > 0 && least_.of_all_ranks(choice) > request_.memory * choice.ranks) return false;
    std::optional<Schedule> schedule;
    const auto try_split = [&](PlanChoice& with) {
      if (request_.memory > 0 && !twobp::fits(least_.of_order(with), request_.memory)) return false;
      if (!schedule) {
        schedule = schedule_of(with);
        ++result_.simulated;
      }
      simulate_split(with, *schedule);
      return fits(with);
    };
    if (try_split(choice)) return true;
    for (const double within : {request_.memory, 0.0}) {
      PlanChoice lighter = choice;
      if (!least_.split_within(within, lighter) || lighter.split == choice.split) continue;
      if (!try_split(lighter)) continue;
      choice = lighter;
      return true;
    }
    return false;
  }

  bool fits(const PlanChoice& choice) const { return twobp::fits(choice.peak_bytes, request_.memory); }

  void simulate_split(PlanChoice& choice, const Schedule& schedule) const {
    const Simulation simulation = simulate_with(choice, schedule, request_);
    choice.step_seconds = simulation.step_seconds;
    choice.bubble = simulation.bubble_ratio();
    choice.peak_bytes = peak_of(simulation);
  }

  Simulation simulate_with(const PlanChoice& choice, const Schedule& schedule, const PlanRequest& request) const {
    const CostModel& model = model_for(models_, choice);
    const auto costs = costs_of(model, choice, schedule.rank_of_stage, request_.one_memory);
    return simulate(schedule, costs, options_of(model, choice, schedule, costs, request));
  }

  // Computes the memory of combinations with W as early as possible, with their own split and with the
  // lightest one, and finds the least. The most promising ones come first, and combinations that cannot be
  // below the least so far are not simulated.
  void find_smallest(const std::vector<Candidate>& all) {
    std::vector<std::pair<double, const PlanChoice*>> promising;
    for (const Candidate& candidate : all) {
      const PlanChoice& choice = candidate.choice;
      promising.emplace_back(least_.of_all_ranks(choice) / choice.ranks, &choice);
    }
    std::stable_sort(promising.begin(), promising.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    for (const auto& [promised, own] : promising) {
      if (result_.smallest && promised >= result_.smallest->peak_bytes) break;
      offer_smallest(*own);
      PlanChoice lightest = *own;
      if (least_.split_within(0, lightest) && lightest.split != own->split) offer_smallest(lightest);
    }
    PlanChoice& smallest = *result_.smallest;
    const Simulation simulation = simulate_with(smallest, schedule_of(smallest), within_memory(smallest.peak_bytes));
    smallest.step_seconds = simulation.step_seconds;
    smallest.bubble = simulation.bubble_ratio();
  }

  void offer_smallest(PlanChoice choice) {
    if (result_.smallest && least_.of_order(choice) >= result_.smallest->peak_bytes) return;
    ++result_.simulated;
    const Schedule schedule = schedule_of(choice);
    // With a byte no op fits, so W runs as early as it can. With more room it runs later, and a message may
    // wait longer with its sender. So the need is raised until it suffices.
    choice.peak_bytes = 1;
    for (int more = 0; more < 9; ++more) {
      const double peak = peak_of(simulate_with(choice, schedule, within_memory(choice.peak_bytes)));
      if (twobp::fits(peak, choice.peak_bytes)) break;
      if (result_.smallest && peak >= result_.smallest->peak_bytes) return;
      choice.peak_bytes = peak;
    }
    result_.smallest = choice;
  }

  PlanRequest within_memory(double memory) const {
    PlanRequest request;
    request.interconnect = request_.interconnect;
    request.memory = memory;
    return request;
  }

  // Gives each row the fastest split found near its own.
  void search_splits(size_t kept) {
    std::vector<PlanChoice> named;
    std::swap(named, result_.best);
    for (PlanChoice& choice : named) {
      const Schedule schedule = schedule_of(choice);
      const auto seconds_of = [&](const std::vector<int>& split) -> std::optional<double> {
        PlanChoice other = choice;
        other.split = split;
        const int frozen = std::accumulate(split.begin(), split.begin() + choice.frozen_stages, 0);
        if (frozen > model_for(models_, choice).first_trainable) return std::nullopt;
        simulate_split(other, schedule);
        ++result_.simulated;
        if (!fits(other)) return std::nullopt;
        return other.step_seconds;
      };
      const double ops = 3.0 * choice.stages * choice.micro_batches * choice.slices;
      const int most = static_cast<int>(std::clamp(kSearchedOps / ops, 50.0, 1000.0));
      choice.split = move_layers(choice.split, choice.step_seconds, most, seconds_of);
      simulate_split(choice, schedule);
      insert_by_speed(result_.best, choice, kept);
    }
  }

  // Adds a searched schedule for each way in `named` to place the model, with its micro-batches.
  void search_schedules(const std::vector<PlanChoice>& named, size_t kept) {
    std::set<std::tuple<std::vector<int>, std::vector<int>, int, int, int, int, std::string>> known;
    for (PlanChoice choice : named) {
      const Schedule schedule = schedule_of(choice);
      if (!known
               .insert({schedule.rank_of_stage, choice.split, choice.micro_batches, choice.micro_batch_size,
                        choice.slices, choice.data_parallel, choice.recompute})
               .second) {
        continue;
      }
      if (choice.streams || choice.frozen_stages > 0) continue;  // the search places W itself, and all F
      const CostModel& model = model_for(models_, choice);
      const auto costs = costs_of(model, choice, schedule.rank_of_stage, request_.one_memory);
      SimulationOptions options = options_of(model, choice, schedule, costs, request_);
      options.p2_order = P2Order::kOldest;  // the search places W itself
      const AutoScheduleOptions effort{.effort = SearchEffort::kQuick, .slices = choice.slices};
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
      if (fits(choice) && choice.step_seconds < before_search) {
        insert_by_speed(result_.best, choice, kept);
      }
    }
  }

  void compare_with_off(const PlanChoice& choice) {
    if (choice.policy == P2Policy::kOff) return;
    PlanChoice off = choice;
    off.policy = P2Policy::kOff;
    off.streams = false;
    simulate_split(off, schedule_of(off));
    result_.speed_up = off.step_seconds / choice.step_seconds;
    if (off.peak_bytes > 0) result_.memory_factor = choice.peak_bytes / off.peak_bytes;
  }

  const PlanRequest& request_;
  ModelsByRecompute models_;
  LeastMemory least_{models_, request_.one_memory};
  PlanResult result_;
};

constexpr double kSameSpeed = 0.99;
constexpr double kSameBytes = 1.05;

bool before(const PlanChoice& a, const PlanChoice& b) {
  const double fast_a = a.samples_per_second();
  const double fast_b = b.samples_per_second();
  if (fast_a != fast_b) return fast_a > fast_b;
  return a.peak_bytes < b.peak_bytes;
}

}  // namespace

std::string gain_text(const PlanResult& result) {
  constexpr double kWorthwhile = 1.01;
  if (result.speed_up < kWorthwhile) return "2BP gains less than 1 %: p2 off is about as fast";
  return concat("2BP: ", fixed(result.speed_up, 2), "x as fast as the same with p2 off, at ",
                fixed(result.memory_factor, 2), "x the memory of the fullest rank");
}

Schedule schedule_of(const PlanChoice& choice) {
  if (choice.found) return *choice.found;
  return choice.schedule.make(choice.stages, choice.ranks, choice.micro_batches, choice.policy, choice.slices,
                              choice.frozen_stages > 0);
}

PlanResult plan(const CostModel& model, const PlanRequest& request) {
  return Planner(model, request).run();
}

PlannedRun planned_run(const CostModel& model, const PlanChoice& choice, const PlanRequest& request) {
  const CostModel recomputed = with_recompute(model, choice.recompute);
  PlannedRun run{schedule_of(choice), {}, {}};
  run.costs = costs_of(recomputed, choice, run.schedule.rank_of_stage, request.one_memory);
  run.options = options_of(recomputed, choice, run.schedule, run.costs, request);
  return run;
}

void insert_by_speed(std::vector<PlanChoice>& best, const PlanChoice& choice, size_t most) {
  best.insert(std::upper_bound(best.begin(), best.end(), choice, before), choice);
  if (best.size() > most) best.pop_back();
}

std::vector<PlanChoice>::iterator lightest_of_fastest(std::vector<PlanChoice>& best) {
  const double fast = kSameSpeed * best.front().samples_per_second();
  const auto compared = best.begin() + static_cast<std::ptrdiff_t>(std::min(best.size(), kCompared));
  const auto end = std::find_if(best.begin(), compared,
                                [&](const PlanChoice& choice) { return choice.samples_per_second() < fast; });
  const auto lightest =
      std::min_element(best.begin(), end, [](const auto& a, const auto& b) { return a.peak_bytes < b.peak_bytes; });
  const double light = kSameBytes * lightest->peak_bytes;
  return std::find_if(best.begin(), end, [&](const PlanChoice& choice) { return choice.peak_bytes <= light; });
}

}  // namespace twobp
