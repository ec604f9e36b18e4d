// The tests of the auto-scheduler share these helpers: random pipelines, the cases solved to optimality, and checks of
// what a search promises.
#pragma once

#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/schedule/costs.h"
#include "tests/schedule/support.h"
#include "twobp/core/check.h"
#include "twobp/plan/auto_schedule/auto_schedule.h"
#include "twobp/plan/memory/stage_bytes.h"
#include "twobp/schedule/check/validate.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp {

struct Pipeline {
  std::vector<int> rank_of_stage;
  int micro_batches = 1;
  std::vector<StageCost> costs;
  SimulationOptions options;
  int slices = 1;

  int ranks() const { return *std::max_element(rank_of_stage.begin(), rank_of_stage.end()) + 1; }
};

// This is a case of tests/golden/optimal_schedules.json with its proven optimum.
struct SolvedPipeline {
  Pipeline pipeline;
  int number = 0;
  double optimum = 0;
};

// tests/plan/optimal_schedules.py made these cases with CP-SAT. It shares no code with the scheduler. Cases that it
// could not prove optimal in time are left out.
inline std::vector<SolvedPipeline> solved_pipelines() {
  std::ifstream file(std::string(TWOBP_SOURCE_DIR) + "/tests/golden/optimal_schedules.json");
  const auto json = nlohmann::json::parse(file);
  std::vector<SolvedPipeline> all;
  for (const auto& entry : json.at("cases")) {
    if (entry.at("status") != "OPTIMAL") continue;
    SolvedPipeline solved;
    solved.number = entry.at("number");
    solved.optimum = entry.at("makespan");
    Pipeline& pipeline = solved.pipeline;
    pipeline.rank_of_stage = entry.at("rank_of_stage").get<std::vector<int>>();
    pipeline.micro_batches = entry.at("micro_batches");
    pipeline.options.message_seconds = entry.at("message_seconds");
    pipeline.options.cap_per_rank = entry.at("cap_per_rank").get<std::vector<double>>();
    for (const auto& cost : entry.at("costs")) {
      StageCost& stage = pipeline.costs.emplace_back();
      stage.forward = cost.at("forward");
      stage.backward_p1 = cost.at("backward_p1");
      stage.backward_p2 = cost.at("backward_p2");
      stage.optimizer = cost.at("optimizer");
      stage.activation_bytes = cost.at("activation_bytes");
      stage.stash_bytes = cost.at("stash_bytes");
    }
    all.push_back(std::move(solved));
  }
  return all;
}

// Makes a random pipeline. The stages are equal, differ by a few percent, or differ widely. W is whole or in pieces.
// Half of the pipelines have messages that take time. Half have caps, from the smallest possible to plenty. If
// `layered`, layers and messages have bytes, and the caps have room for the peaks within I and W.
inline Pipeline random_pipeline(Random& random, Placement placement, int ranks, int micro_batches, bool layered = false,
                                int slices = 1) {
  Pipeline pipeline;
  pipeline.slices = slices;
  const int stages = placement == Placement::kLinear ? ranks : 2 * ranks;
  pipeline.rank_of_stage = place_stages(placement, stages, ranks);
  pipeline.micro_batches = micro_batches;
  const double spread = std::vector<double>{0, 0.1, 0.9}.at(random_int(random, 0, 2));
  const double f = random_real(random, 0.5, 2);
  const double i = random_real(random, 0.5, 2);
  const double w = random_real(random, 0.2, 2);
  const int pieces = random_int(random, 0, 1) == 0 ? 1 : random_int(random, 2, 8);
  const bool optimizer = random_int(random, 0, 3) == 0;
  for (int stage = 0; stage < stages; ++stage) {
    const auto about = [&](double value) { return value * random_real(random, 1 - spread, 1 + spread); };
    StageCost& cost = pipeline.costs.emplace_back();
    cost.forward = about(f);
    cost.backward_p1 = about(i);
    cost.backward_p2 = about(w);
    cost.p2_units = pieces;
    cost.optimizer = optimizer ? random_real(random, 0, 1) : 0;
    cost.activation_bytes = about(1);
    cost.stash_bytes = about(random_real(random, 0.2, 1.2));
  }
  if (layered) give_layers(random, pipeline.costs);
  if (slices > 1) pipeline.costs = in_slices(random, pipeline.costs, slices);
  std::vector<double> least = least_activation_bytes(pipeline.rank_of_stage, pipeline.costs, slices);
  if (layered) {
    const auto bytes = stage_bytes(pipeline.costs, stages, slices);
    for (size_t i = 0; i < bytes.size(); ++i) {
      const StageBytes& of = bytes[i];
      least[pipeline.rank_of_stage[i % stages]] +=
          of.stash + std::max(0.0, of.p1_peak) + of.p2_peak + std::max(0.0, of.for_others);
    }
  }
  if (random_int(random, 0, 1) == 0) pipeline.options.message_seconds = random_real(random, 0, 0.5);
  if (random_int(random, 0, 1) == 0) {
    const double plenty = random_real(random, 1, 1.5 * ranks);
    for (const double bytes : least) pipeline.options.cap_per_rank.push_back(bytes * plenty);
  }
  return pipeline;
}

// Gives each micro-batch its own seconds, from half of what it had to twice that.
inline void make_unequal(Random& random, Pipeline& pipeline) {
  const std::vector<StageCost> one = pipeline.costs;
  const size_t rows = one.size() / pipeline.rank_of_stage.size();
  pipeline.costs.clear();
  for (int m = 0; m < pipeline.micro_batches; ++m) {
    const double f = random_real(random, 0.5, 2);
    const double i = random_real(random, 0.5, 2);
    const double w = random_real(random, 0.5, 2);
    for (size_t slice = 0; slice < one.size(); slice += one.size() / rows) {
      for (int again = rows == 1 ? pipeline.slices : 1; again > 0; --again) {
        for (size_t stage = 0; stage < one.size() / rows; ++stage) {
          StageCost& cost = pipeline.costs.emplace_back(one[slice + stage]);
          cost.forward *= f;
          cost.backward_p1 *= i;
          cost.backward_p2 *= w;
        }
      }
    }
  }
}

inline bool within_caps(const Simulation& simulation, const SimulationOptions& options) {
  for (size_t rank = 0; rank < options.cap_per_rank.size(); ++rank) {
    const double cap = options.cap_per_rank[rank];
    if (cap > 0 && simulation.ranks[rank].peak_bytes > cap * (1 + 1e-9)) return false;
  }
  return true;
}

// Returns the time of the best named schedule with this placement that stays within the caps, under any policy.
inline std::optional<double> best_named(const Pipeline& pipeline) {
  std::optional<double> best;
  for (const NamedVariant& variant :
       named_schedules_on(pipeline.rank_of_stage, pipeline.micro_batches, pipeline.slices)) {
    const Schedule schedule = make_schedule(variant.name, static_cast<int>(pipeline.rank_of_stage.size()),
                                            pipeline.micro_batches, variant.policy, pipeline.ranks(), pipeline.slices);
    const Simulation simulation = simulate(schedule, pipeline.costs, pipeline.options);
    if (!within_caps(simulation, pipeline.options)) continue;
    if (!best || simulation.step_seconds < *best) best = simulation.step_seconds;
  }
  return best;
}

inline AutoSchedule schedule_for(const Pipeline& pipeline, SearchEffort effort = SearchEffort::kQuick,
                                 uint64_t seed = 1) {
  return auto_schedule(pipeline.rank_of_stage, pipeline.micro_batches, pipeline.costs, pipeline.options,
                       {.effort = effort, .seed = seed, .slices = pipeline.slices});
}

// Valid, in micro-batch order, within the caps, as fast as it says, not faster than possible.
inline void check_promises(const Pipeline& pipeline, const AutoSchedule& found) {
  validate(found.schedule);
  EXPECT_FALSE(found.schedule.allow_reorder);
  EXPECT_EQ(found.schedule.rank_of_stage, pipeline.rank_of_stage);
  EXPECT_EQ(found.schedule.slices, pipeline.slices);
  EXPECT_EQ(found.schedule.micro_batches, pipeline.micro_batches * pipeline.slices);
  const Simulation simulation = simulate(found.schedule, pipeline.costs, pipeline.options);
  EXPECT_EQ(simulation.step_seconds, found.seconds);
  EXPECT_TRUE(within_caps(simulation, pipeline.options));
  EXPECT_GE(found.seconds, found.bound * (1 - 1e-9));
}

// Checks that the schedule is no slower than the best named one, which it knows. Returns that one's time, if any is
// within the caps.
inline std::optional<double> check_against_named(const Pipeline& pipeline, const AutoSchedule& found) {
  const std::optional<double> named = best_named(pipeline);
  EXPECT_EQ(named.has_value(), !found.best_named.empty());
  if (named) {
    EXPECT_LE(found.seconds, *named * (1 + 1e-11)) << found.best_named;
    EXPECT_NEAR(found.named_seconds, *named, 1e-9 * *named);
  }
  return named;
}

}  // namespace twobp
