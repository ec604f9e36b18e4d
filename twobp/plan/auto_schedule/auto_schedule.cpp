#include "twobp/plan/auto_schedule/auto_schedule.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/plan/auto_schedule/problem.h"
#include "twobp/schedule/named_schedules.h"

namespace twobp {
namespace {

constexpr double kSame = 1e-12;          // relative: a smaller gain is none
constexpr double kBoundRounding = 1e-9;  // relative: sums in another order

struct Budget {
  int rules;          // of list scheduling
  int starts;         // of local search
  double op_updates;  // that local search may make: a move costs one for each op
  long most_iterations;
};

Budget budget_of(SearchEffort effort, int tasks) {
  Budget budget = effort == SearchEffort::kQuick ? Budget{80, 3, 4e6, 4000} : Budget{400, 12, 5e7, 80'000};
  // List scheduling costs about ten updates for each op.
  budget.rules = std::clamp(static_cast<int>(budget.op_updates / (10.0 * tasks)), 12, budget.rules);
  budget.most_iterations = std::clamp(static_cast<long>(budget.op_updates / tasks), 20L, budget.most_iterations);
  return budget;
}

struct Start {
  TaskOrder order;
  double seconds = 0;
};

PipelineProblem without_caps(const std::vector<int>& rank_of_stage, int micro_batches,
                             const std::vector<StageCost>& costs, SimulationOptions options, int slices) {
  options.cap_per_rank.clear();
  return {rank_of_stage, micro_batches, costs, options, slices};
}

// A micro-batch begins when the one before it has ended. `problem` has no caps, under which list scheduling
// may find no order.
TaskOrder one_by_one(const PipelineProblem& problem) {
  GreedyRule rule;
  rule.in_flight = std::numeric_limits<double>::min();  // one micro-batch, however fast
  return greedy_order(problem, rule);
}

class AutoScheduler {
 public:
  AutoScheduler(const std::vector<int>& rank_of_stage, int micro_batches, const std::vector<StageCost>& costs,
                const SimulationOptions& options, const AutoScheduleOptions& search)
      : problem_(rank_of_stage, micro_batches, costs, options, search.slices),
        micro_batches_(micro_batches),
        costs_(costs),
        options_(options),
        search_(search),
        budget_(budget_of(search.effort, problem_.tasks())) {
    options_.recorded.clear();
    options_.reject_over_cap = false;
    options_.timeline = true;  // from_simulation reads it
    result_.bound = lower_bound(rank_of_stage, micro_batches, costs, options, search.slices);
    result_.seconds = std::numeric_limits<double>::infinity();
  }

  AutoSchedule run() {
    TWOBP_CHECK(search_.most_bytes.empty() || std::cmp_equal(search_.most_bytes.size(), problem_.ranks()),
                "most_bytes has ", search_.most_bytes.size(), " entries for ", problem_.ranks(), " ranks");
    try_named();
    std::optional<NamedBest> named = std::move(named_);
    for (const GreedyRule& rule : greedy_rules(budget_.rules, search_.seed)) {
      add_start(greedy_order(problem_, rule));
      if (!starts_.empty() && starts_.back().seconds <= good_enough()) break;
    }
    std::stable_sort(starts_.begin(), starts_.end(),
                     [](const Start& a, const Start& b) { return a.seconds < b.seconds; });
    if (!starts_.empty()) {
      offer(starts_.front().order, "list scheduling");
      improve();
    }
    // In the simulation, messages and layers may take a good order over a cap. Then the next order that fits
    // must do.
    for (size_t i = 1; i < starts_.size() && !std::isfinite(result_.seconds); ++i) {
      offer(starts_[i].order, "list scheduling");
    }
    if (named && named->seconds < result_.seconds * (1 - kSame)) {
      result_.schedule = std::move(named->schedule);
      result_.seconds = named->seconds;
      result_.method = "named";
    }
    if (!std::isfinite(result_.seconds)) offer(one_by_one(uncapped()), "list scheduling");
    if (!std::isfinite(result_.seconds)) throw NoScheduleFits("no schedule fits the caps");
    TWOBP_CHECK(result_.seconds >= result_.bound * (1 - kBoundRounding), "a schedule of ", result_.seconds,
                " seconds was found, which is below the lower bound of ", result_.bound,
                ": the bound is wrong for these costs, please report them");
    return std::move(result_);
  }

 private:
  struct NamedBest {
    Schedule schedule;
    double seconds = 0;
  };

  PipelineProblem uncapped() const {
    return without_caps(problem_.rank_of_stage(), micro_batches_, costs_, options_, search_.slices);
  }
  double good_enough() const { return result_.bound * (1 + kSame); }

  bool within_caps(const Simulation& simulation) const {
    for (int rank = 0; rank < problem_.ranks(); ++rank) {
      const double most = search_.most_bytes.empty() ? problem_.cap(rank) : search_.most_bytes.at(rank);
      if (simulation.ranks[rank].peak_bytes > most) return false;
    }
    return true;
  }

  void add_start(TaskOrder order) {
    if (order.ranks.empty()) return;
    const double seconds = order_seconds(problem_, order);
    starts_.push_back({std::move(order), seconds});
  }

  // Tries every named schedule on the placement, under every policy. They are starts of the search, and the
  // best is the one to beat.
  void try_named() {
    for (const NamedVariant& variant : named_schedules_on(problem_.rank_of_stage(), micro_batches_, search_.slices)) {
      Schedule schedule = make_schedule(variant.name, problem_.stages(), micro_batches_, variant.policy,
                                        problem_.ranks(), search_.slices);
      const Simulation simulation = simulate(schedule, costs_, options_);
      if (!within_caps(simulation)) continue;
      TaskOrder order = problem_.from_simulation(simulation);
      if (!order.ranks.empty() && problem_.fits(order)) add_start(std::move(order));
      if (named_ && simulation.step_seconds >= named_->seconds * (1 - kSame)) continue;
      result_.best_named = concat(variant.name, " ", policy_name(variant.policy));
      result_.named_seconds = simulation.step_seconds;
      named_ = NamedBest{std::move(schedule), simulation.step_seconds};
    }
  }

  // Improves each start with a short search, then the best result with the remaining budget.
  void improve() {
    std::vector<Start> improved;
    const long all = budget_.most_iterations;
    double last = -1;
    for (size_t i = 0; i < starts_.size() && static_cast<int>(improved.size()) < budget_.starts; ++i) {
      if (starts_[i].seconds <= last * (1 + 1e-9)) continue;  // most likely the same order again
      last = starts_[i].seconds;
      improved.push_back(search(starts_[i].order, all / (2L * budget_.starts)));
      if (improved.back().seconds <= good_enough()) break;
    }
    std::stable_sort(improved.begin(), improved.end(),
                     [](const Start& a, const Start& b) { return a.seconds < b.seconds; });
    if (improved.front().seconds > good_enough()) {
      const size_t finalists = std::min<size_t>(2, improved.size());
      for (size_t i = 0; i < finalists; ++i) {
        Start start = search(improved[i].order, all / 4);
        if (start.seconds < improved.front().seconds) std::swap(improved.front(), start);
      }
    }
    for (const Start& start : improved) {
      const double before = result_.seconds;
      offer(start.order, "local search");
      if (result_.seconds < before) break;
    }
  }
  Start search(const TaskOrder& from, long iterations) {
    SearchResult found = improve_order(problem_, from, iterations, good_enough(), search_.seed + ++searches_);
    result_.iterations += found.iterations;
    return {std::move(found.order), found.seconds};
  }

  // Takes the order as the result if it is better, with W placed or in pieces.
  void offer(const TaskOrder& order, const char* method) {
    bool pieces = false;
    for (int stage = 0; stage < problem_.stages(); ++stage) pieces |= problem_.cost(stage, 0).p2_units > 1;
    for (const P2Policy policy : {P2Policy::kPlaced, P2Policy::kFill}) {
      if (policy == P2Policy::kFill && !pieces) continue;
      Schedule schedule = problem_.to_schedule(order, policy);
      SimulationOptions options = options_;
      options.timeline = false;
      const Simulation simulation = simulate(schedule, costs_, options);
      if (!within_caps(simulation) || simulation.step_seconds >= result_.seconds * (1 - kSame)) continue;
      result_.schedule = std::move(schedule);
      result_.seconds = simulation.step_seconds;
      result_.method = method;
    }
  }

  PipelineProblem problem_;
  int micro_batches_;
  const std::vector<StageCost>& costs_;
  SimulationOptions options_;
  AutoScheduleOptions search_;
  Budget budget_;
  AutoSchedule result_;
  std::optional<NamedBest> named_;
  std::vector<Start> starts_;
  uint64_t searches_ = 0;
};

// All digits, so that a number in a message is exactly sufficient.
std::string exactly(double value) {
  std::array<char, 512> buffer{};
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value, std::chars_format::fixed).ptr;
  return {buffer.data(), end};
}

// Names the rank whose cap is furthest below what the least demanding schedule needs, and that need. Under
// equal caps, a schedule fits from there on.
std::string what_would_fit(const PipelineProblem& uncapped, const std::vector<StageCost>& costs,
                           const SimulationOptions& options) {
  double least = std::numeric_limits<double>::infinity();
  int at = 0;
  double needs = 0;
  const auto consider = [&](const Schedule& schedule) {
    const std::vector<double> need = smallest_caps(schedule, costs, options);
    double most = 0;
    int rank = 0;
    for (size_t r = 0; r < need.size(); ++r) {
      const double cap = options.cap_per_rank[r];
      if (cap <= 0 || need[r] / cap <= most) continue;
      most = need[r] / cap;
      rank = static_cast<int>(r);
    }
    if (most >= least) return;
    least = most;
    at = rank;
    needs = need[rank];
  };
  consider(uncapped.to_schedule(one_by_one(uncapped), P2Policy::kPlaced));
  const int micro_batches = uncapped.units() / uncapped.slices();
  for (const NamedVariant& variant : named_schedules_on(uncapped.rank_of_stage(), micro_batches, uncapped.slices())) {
    consider(make_schedule(variant.name, uncapped.stages(), micro_batches, variant.policy, uncapped.ranks(),
                           uncapped.slices()));
  }
  return concat("no schedule fits the cap of rank ", at, ", ", exactly(options.cap_per_rank[at]),
                " bytes: the most frugal one needs ", exactly(needs), "; give it at least that");
}

}  // namespace

AutoSchedule auto_schedule(const std::vector<int>& rank_of_stage, int micro_batches,
                           const std::vector<StageCost>& costs, const SimulationOptions& options,
                           const AutoScheduleOptions& search) {
  try {
    return AutoScheduler(rank_of_stage, micro_batches, costs, options, search).run();
  } catch (const NoScheduleFits&) {
    throw NoScheduleFits(
        what_would_fit(without_caps(rank_of_stage, micro_batches, costs, options, search.slices), costs, options));
  }
}

std::vector<Placement> possible_placements(int stages, int ranks) {
  std::vector<Placement> placements;
  if (ranks < 1 || stages < 1) return placements;
  if (stages == ranks) placements.push_back(Placement::kLinear);
  if (stages == 2 * ranks) placements.push_back(Placement::kV);
  if (stages > ranks && stages % ranks == 0) placements.push_back(Placement::kLooped);
  return placements;
}

}  // namespace twobp
