// Prints the results of the auto-scheduler as a table: the best named schedule that fits, the schedule that the search
// finds, the lower bound, and the largest possible distance from it. Everything except the search time is the same on
// every machine.
#include <chrono>
#include <cstdio>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "twobp/plan/auto_schedule/auto_schedule.h"

namespace {

using namespace twobp;

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Stages whose F, I and W differ by up to `spread` of the mean. They are the same on every platform.
std::vector<StageCost> stages_of(int stages, double spread, uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto about = [&](double mean) {
    return mean * (1 + spread * (static_cast<double>(random() >> 11U) * 0x1p-52 - 1));
  };
  std::vector<StageCost> costs(stages);
  for (StageCost& cost : costs) {
    cost.forward = about(1);
    cost.backward_p1 = about(1);
    cost.backward_p2 = about(0.9);
    cost.p2_units = 4;
    cost.stash_bytes = 0.7;
  }
  return costs;
}

// `share` is the cap relative to the peak of 1f1b on its fullest rank (N micro-batches of all its stages). 0 means no
// cap.
void row(const char* what, Placement placement, int ranks, int micro_batches, double spread, double message,
         double share, SearchEffort effort) {
  const int per_rank = usual_stages_per_rank(placement);
  auto costs = stages_of(per_rank * ranks, spread, 7);
  if (std::string(what) == "head") costs.back().forward = costs.back().backward_p1 = 1.6;  // large vocabulary
  SimulationOptions options;
  options.message_seconds = message;
  if (share > 0) options.cap_per_rank.assign(ranks, std::max(1.0, share * ranks) * per_rank);
  const auto begin = std::chrono::steady_clock::now();
  const AutoSchedule found = auto_schedule(place_stages(placement, per_rank * ranks, ranks), micro_batches, costs,
                                           options, {.effort = effort});
  std::printf("%-8s %-8s %3d %4d %6.2f %5s  %-22s %9.2f %9.2f  %-16s %9.2f %6.2f%% %6.3fx %6.1fs\n", what,
              std::string(placement_name(placement)).c_str(), ranks, micro_batches, message,
              share > 0 ? (std::to_string(static_cast<int>(100 * share)) + "%").c_str() : "none",
              found.best_named.empty() ? "none fits" : found.best_named.c_str(), found.named_seconds, found.seconds,
              found.method.c_str(), found.bound, 100 * found.gap(), found.gain(), seconds_since(begin));
  std::fflush(stdout);
}

void table() {
  std::printf("%-8s %-8s %3s %4s %6s %5s  %-22s %9s %9s  %-16s %9s %7s %7s %7s\n", "stages", "placed", "N", "M", "msg",
              "cap", "best named", "seconds", "auto", "found by", "bound", "gap", "gain", "search");
  for (const Placement placement : {Placement::kLinear, Placement::kV, Placement::kLooped}) {
    for (const char* what : {"equal", "unequal", "head"}) {
      const double spread = std::string(what) == "unequal" ? 0.3 : 0;
      for (const double share : {0.0, 1.0, 0.5}) {
        row(what, placement, 4, 8, spread, 0.1, share, SearchEffort::kUsual);
        row(what, placement, 8, 32, spread, 0.1, share, SearchEffort::kUsual);
      }
    }
  }
  row("unequal", Placement::kLinear, 64, 256, 0.3, 0.1, 1, SearchEffort::kUsual);
  row("unequal", Placement::kV, 64, 256, 0.3, 0.1, 1, SearchEffort::kQuick);
}

// Checks the cases that an exact solver has solved (tests/plan/optimal_schedules.py).
void against_optima(const char* file, const char* name, SearchEffort effort) {
  const auto begin = std::chrono::steady_clock::now();
  std::ifstream input(file);
  const auto json = nlohmann::json::parse(input);
  int cases = 0;
  int equal = 0;
  int bounds = 0;
  double gaps = 0;
  double worst = 0;
  for (const auto& entry : json.at("cases")) {
    if (entry.at("status") != "OPTIMAL") continue;
    std::vector<StageCost> costs;
    for (const auto& cost : entry.at("costs")) {
      StageCost& stage = costs.emplace_back();
      stage.forward = cost.at("forward");
      stage.backward_p1 = cost.at("backward_p1");
      stage.backward_p2 = cost.at("backward_p2");
      stage.optimizer = cost.at("optimizer");
      stage.activation_bytes = cost.at("activation_bytes");
      stage.stash_bytes = cost.at("stash_bytes");
    }
    SimulationOptions options;
    options.message_seconds = entry.at("message_seconds");
    options.cap_per_rank = entry.at("cap_per_rank").get<std::vector<double>>();
    const AutoSchedule found = auto_schedule(entry.at("rank_of_stage").get<std::vector<int>>(),
                                             entry.at("micro_batches"), costs, options, {.effort = effort});
    const double gap = found.seconds / entry.at("makespan").get<double>() - 1;
    ++cases;
    equal += gap <= 1e-9 ? 1 : 0;
    bounds += found.bound >= entry.at("makespan").get<double>() * (1 - 1e-9) ? 1 : 0;
    gaps += gap;
    worst = std::max(worst, gap);
  }
  std::printf(
      "%s effort: equal to the exact optimum in %d of %d cases, mean gap %.4f%%, worst %.2f%%; the lower "
      "bound "
      "is the optimum in %d; %.1f s\n",
      name, equal, cases, 100 * gaps / cases, 100 * worst, bounds, seconds_since(begin));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc != 2) {
      std::fprintf(stderr, "usage: auto_schedule_table tests/golden/optimal_schedules.json\n");
      return 2;
    }
    against_optima(argv[1], "quick", SearchEffort::kQuick);
    against_optima(argv[1], "usual", SearchEffort::kUsual);
    std::printf("\n");
    table();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
