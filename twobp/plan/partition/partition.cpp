#include "twobp/plan/partition/partition.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/plan/partition/problem.h"

namespace twobp {

namespace {

// A V is solved exactly up to here. Its table has this many states, of two numbers of layers each, in 16 bits: a number
// that does not fit would need more states than these.
constexpr double kMostStates = 50e6;

void check_size(const std::vector<double>& values, size_t layers, const char* what) {
  TWOBP_CHECK(values.size() == layers, "a partition of ", layers, " layers has ", values.size(), " ", what,
              ": give one for each layer");
  for (size_t i = 0; i < values.size(); ++i) {
    TWOBP_CHECK(std::isfinite(values[i]) && values[i] >= 0, "layer ", i, " has ", values[i], " ", what,
                ": must be finite and not negative");
  }
}

std::vector<double> sums_before(const std::vector<double>& values) {
  std::vector<double> sums(values.size() + 1, 0);
  std::partial_sum(values.begin(), values.end(), sums.begin() + 1);
  return sums;
}

// One stage on each rank.
std::vector<int> linear(int stages) {
  std::vector<int> rank_of_stage(std::max(stages, 0));
  std::iota(rank_of_stage.begin(), rank_of_stage.end(), 0);
  return rank_of_stage;
}

// The goal of a split that needs no search: an upper bound.
double even_bound(const PartitionProblem& problem, PartitionGoal goal) {
  std::vector<double> layers;
  for (int l = 0; l < problem.layers(); ++l) layers.push_back(problem.least(goal, l, l + 1));
  return worst_rank(problem, balanced_split(layers, problem.stages()), goal);
}

bool exact_for_v(const PartitionProblem& problem) {
  const double layers = problem.layers() + 1;
  return problem.is_v() && problem.ranks() * layers * layers <= kMostStates;
}

std::vector<int> solve(const PartitionProblem& problem, PartitionGoal goal, double bound) {
  if (problem.one_stage_a_rank()) return split_linear(problem, goal);
  if (exact_for_v(problem)) return split_v(problem, goal, bound);
  return split_by_search(problem, goal);
}

}  // namespace

PartitionProblem::PartitionProblem(const std::vector<double>& layer_seconds, const std::vector<int>& rank_of_stage,
                                   const PartitionBytes& bytes)
    : rank_of_stage_(rank_of_stage), in_flight_(rank_of_stage.size(), 1), caps_(bytes.caps) {
  const size_t layers = layer_seconds.size();
  const int stages = static_cast<int>(rank_of_stage.size());
  TWOBP_CHECK(stages >= 1, "a partition of ", layers, " layers needs a placement of at least one stage");
  check_stages(layers, rank_of_stage);
  check_size(layer_seconds, layers, "seconds");
  std::vector<bool> used(stages, false);
  for (const int rank : rank_of_stage) {
    TWOBP_CHECK(rank >= 0 && rank < stages, "a placement of ", stages, " stages names rank ", rank,
                ", but ranks must be from 0 to ", stages - 1);
    used[rank] = true;
    ranks_ = std::max(ranks_, rank + 1);
  }
  for (int rank = 0; rank < ranks_; ++rank) {
    TWOBP_CHECK(used[rank], "a placement has no stage on rank ", rank, " of ", ranks_);
  }
  seconds_ = sums_before(layer_seconds);
  if (caps_.empty()) {
    fixed_ = held_ = std::vector<double>(layers + 1, 0);
    return;
  }
  check_size(bytes.fixed, layers, "fixed bytes");
  check_size(bytes.held, layers, "held bytes");
  TWOBP_CHECK(static_cast<int>(caps_.size()) == ranks_, "a partition over ", ranks_, " ranks has ", caps_.size(),
              " caps: give one for each rank, or none");
  for (const double cap : caps_) {
    TWOBP_CHECK(std::isfinite(cap) && cap > 0, "a rank's cap is ", cap, " bytes: must be finite and above 0");
  }
  if (!bytes.in_flight.empty()) {
    TWOBP_CHECK(static_cast<int>(bytes.in_flight.size()) == stages, "a partition into ", stages, " stages has ",
                bytes.in_flight.size(), " numbers of micro-batches in flight: give one for each stage");
    in_flight_.assign(bytes.in_flight.begin(), bytes.in_flight.end());
    least_in_flight_ = *std::min_element(in_flight_.begin(), in_flight_.end());
    TWOBP_CHECK(least_in_flight_ >= 0, "in_flight has ", least_in_flight_,
                ", but a number of micro-batches must not be negative");
  }
  fixed_ = sums_before(bytes.fixed);
  held_ = sums_before(bytes.held);
}

bool PartitionProblem::is_v() const {
  if (stages() != 2 * ranks_) return false;
  for (int s = 0; s < stages(); ++s) {
    if (rank_of_stage_[s] != std::min(s, stages() - 1 - s)) return false;
  }
  return true;
}

std::vector<double> rank_loads(const PartitionProblem& problem, const std::vector<int>& split, PartitionGoal goal) {
  std::vector<double> loads(problem.ranks(), 0);
  for (int s = 0, begin = 0; s < problem.stages(); begin += split[s++]) {
    loads[problem.rank_of(s)] += problem.goal(goal, s, begin, begin + split[s]);
  }
  return loads;
}

double worst_rank(const PartitionProblem& problem, const std::vector<int>& split, PartitionGoal goal) {
  const auto loads = rank_loads(problem, split, goal);
  return *std::max_element(loads.begin(), loads.end());
}

bool keeps_caps(const PartitionProblem& problem, const std::vector<int>& split) {
  const auto loads = rank_loads(problem, split, PartitionGoal::kBytes);
  for (int rank = 0; rank < problem.ranks(); ++rank) {
    if (!problem.fits(rank, loads[rank])) return false;
  }
  return true;
}

std::vector<int> split_linear(const PartitionProblem& problem, PartitionGoal goal, double most_seconds) {
  const int layers = problem.layers();
  const int stages = problem.stages();
  // best[s][l]: the worst stage if the first l layers make s stages; cut[s][l]: the begin of its last stage.
  std::vector<std::vector<double>> best(stages + 1,
                                        std::vector<double>(layers + 1, std::numeric_limits<double>::infinity()));
  std::vector<std::vector<int>> cut(stages + 1, std::vector<int>(layers + 1, -1));
  best[0][0] = 0;
  for (int s = 1; s <= stages; ++s) {
    const int rank = problem.rank_of(s - 1);
    for (int l = s; l <= layers; ++l) {
      for (int begin = s - 1; begin < l; ++begin) {
        const double worst = std::max(best[s - 1][begin], problem.goal(goal, s - 1, begin, l));
        if (worst > best[s][l] || std::isinf(worst)) continue;
        if (goal == PartitionGoal::kSeconds && !problem.fits(rank, problem.bytes(s - 1, begin, l))) continue;
        if (problem.seconds(begin, l) > most_seconds) continue;
        best[s][l] = worst;
        cut[s][l] = begin;
      }
    }
  }
  if (cut[stages][layers] < 0) return {};
  std::vector<int> split(stages);
  for (int s = stages, l = layers; s > 0; l = cut[s][l], --s) split[s - 1] = l - cut[s][l];
  return split;
}

std::vector<int> balanced_split(const std::vector<double>& layer_seconds, int stages) {
  return balanced_split(layer_seconds, linear(stages));
}

std::vector<int> balanced_split(const std::vector<double>& layer_seconds, const std::vector<int>& rank_of_stage,
                                const PartitionBytes& bytes) {
  const PartitionProblem problem(layer_seconds, rank_of_stage, bytes);
  double bound = 0;  // some split that keeps the caps is not worse
  if (problem.has_caps()) {
    const auto lightest = solve(problem, PartitionGoal::kBytes, even_bound(problem, PartitionGoal::kBytes));
    const double smallest = worst_rank(problem, lightest, PartitionGoal::kBytes);
    auto split = solve(problem, PartitionGoal::kSeconds,
                       keeps_caps(problem, lightest) ? worst_rank(problem, lightest, PartitionGoal::kSeconds)
                                                     : problem.seconds(0, problem.layers()));
    TWOBP_CHECK(!split.empty(), "no split of ", problem.layers(), " layers over ", problem.ranks(),
                " ranks stays within the given memory: the smallest cap that suffices for every rank is ",
                format_bytes(smallest), " (", std::llround(std::ceil(smallest)), " bytes)");
    return split;
  }
  if (!problem.one_stage_a_rank()) bound = even_bound(problem, PartitionGoal::kSeconds);
  return solve(problem, PartitionGoal::kSeconds, bound);
}

std::vector<int> lightest_split(const PartitionBytes& bytes, const std::vector<int>& rank_of_stage) {
  TWOBP_CHECK(!rank_of_stage.empty(), "a partition of ", bytes.fixed.size(),
              " layers needs a placement of at least one stage");
  PartitionBytes capped = bytes;
  capped.caps.assign(*std::max_element(rank_of_stage.begin(), rank_of_stage.end()) + 1, 1.0);
  const PartitionProblem problem(std::vector<double>(bytes.fixed.size(), 0), rank_of_stage, capped);
  return solve(problem, PartitionGoal::kBytes, even_bound(problem, PartitionGoal::kBytes));
}

std::vector<int> balanced_light_split(const std::vector<double>& layer_seconds, const PartitionBytes& bytes,
                                      double slack) {
  TWOBP_CHECK(slack >= 0, "slack, the fraction by which a split may be slower, is ", slack, ": must not be negative");
  const auto stages = linear(static_cast<int>(bytes.in_flight.size()));
  PartitionBytes capped = bytes;
  capped.caps.assign(stages.size(), 1);  // any value: only the lightest split is wanted
  const PartitionProblem problem(layer_seconds, stages, capped);
  std::vector<int> fastest = balanced_split(layer_seconds, stages);
  const double allowed = worst_rank(problem, fastest, PartitionGoal::kSeconds) * (1 + slack);
  const std::vector<int> lightest = split_linear(problem, PartitionGoal::kBytes, allowed);
  // Of the splits that need no more bytes, the fastest.
  const double least = worst_rank(problem, lightest, PartitionGoal::kBytes);
  if (least <= 0) return fastest;  // no layer has bytes
  capped.caps.assign(stages.size(), least);
  return split_linear({layer_seconds, stages, capped}, PartitionGoal::kSeconds);
}

double imbalance(const std::vector<double>& stage_seconds) {
  const double sum = std::accumulate(stage_seconds.begin(), stage_seconds.end(), 0.0);
  const double slowest = *std::max_element(stage_seconds.begin(), stage_seconds.end());
  return sum > 0 ? slowest * static_cast<double>(stage_seconds.size()) / sum : 1;
}

void check_stages(size_t layers, const std::vector<int>& rank_of_stage) {
  const size_t stages = rank_of_stage.size();
  if (stages <= layers) return;
  const int ranks = *std::max_element(rank_of_stage.begin(), rank_of_stage.end()) + 1;
  const std::string remedy =
      std::cmp_less_equal(ranks, layers)
          ? concat("use a schedule with one stage on each of ", ranks, ranks == 1 ? " rank" : " ranks",
                   " (pipeline.schedule 1f1b or zb-h1), or at most ", layers, " stages (pipeline.stages)")
          : concat("use at most ", layers, layers == 1 ? " rank" : " ranks",
                   " (pipeline.ranks), with one stage on each (pipeline.schedule 1f1b or zb-h1)");
  fail("the model has ", layers, layers == 1 ? " layer" : " layers", ", too few for ", stages,
       " stages (pipeline.stages): ", remedy);
}

void check_split(const std::vector<int>& split, int layers, int stages) {
  const bool positive = std::all_of(split.begin(), split.end(), [](int n) { return n >= 1; });
  const int64_t sum = std::accumulate(split.begin(), split.end(), int64_t{0});
  TWOBP_CHECK(static_cast<int>(split.size()) == stages && positive && sum == layers, "pipeline.split must be ", stages,
              " counts of at least 1 that sum to the model's ", layers, " layers; it has ", split.size(),
              " counts that sum to ", sum);
}

}  // namespace twobp
