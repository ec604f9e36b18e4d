// Tests the simulation's bytes against the meter. They are equal if no message can be in transit. Otherwise they differ
// by at most the messages in transit. (byte_cap_test.cpp has p2 off without messages.)
#include <algorithm>
#include <vector>

#include "tests/pipeline/step_bytes.h"
#include "twobp/pipeline/profile/profile.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::kMessage;
using test::measured_peaks;
using test::SplitModel;

std::vector<SplitModel> cases() {
  return {{"mlp on 1", test::small_mlp(4), {4}, {}},
          {"mlp on 3", test::small_mlp(6), {2, 2, 2}, {}},
          {"llama on 1", test::small_llama(2), {6}, {}},
          {"llama on 2", test::small_llama(2), {3, 3}, {}},
          {"mlp as a V on 2", test::small_mlp(4), {1, 1, 1, 1}, {0, 1, 1, 0}}};
}

std::vector<std::string> schedules_for(const SplitModel& c) {
  if (!c.rank_of_stage.empty()) return {"zb-v"};
  return {"naive", "gpipe", "1f1b"};
}

// Returns the order of F, I and single units of W in the executor's run. An op counts from its beginning.
std::vector<std::vector<RecordedOp>> order_of(const StepReport& report) {
  std::vector<std::vector<RecordedOp>> order;
  for (const auto& events : report.events) {
    auto& list = order.emplace_back();
    for (const Event& event : events) {
      if (event.kind == Event::Kind::kBackwardP2) {
        list.push_back({Op::kBackwardP2, event.stage, event.micro_batch, 1});
      } else if (event.kind == Event::Kind::kReceive) {
        list.push_back(
            {event.peer < event.stage ? Op::kRecvForward : Op::kRecvBackward, event.stage, event.micro_batch, 0});
      } else if (event.kind < Event::Kind::kBackwardP2 && event.part == 0) {
        list.push_back(
            {event.kind == Event::Kind::kForward ? Op::kForward : Op::kBackwardP1, event.stage, event.micro_batch, 0});
      }
    }
  }
  return order;
}

TEST(SimulatedPeaks, MatchTheMeterWhenTheRecordedOrderIsReplayed) {
  for (const SplitModel& c : cases()) {
    Pipeline pipeline = test::measured_pipeline(c);
    for (const auto& name : schedules_for(c)) {
      for (const P2Policy policy : {P2Policy::kOff, P2Policy::kEnd, P2Policy::kFill}) {
        const int micro_batches = 4;
        const StepPlan plan = pipeline.plan(name, micro_batches, policy, {P2Batching::kLoop, 0});
        StepReport report;
        const auto peaks = measured_peaks(pipeline, plan, &report);
        SimulationOptions options;
        options.recorded = order_of(report);
        const Simulation simulation = simulate(plan.schedule, profiled_costs(pipeline.layer_costs()), options);
        for (int r = 0; r < pipeline.ranks(); ++r) {
          const int64_t measured = peaks[r];
          const auto predicted = static_cast<int64_t>(simulation.ranks[r].peak_bytes);
          const int64_t under_way = pipeline.ranks() > 1 ? micro_batches * kMessage : 0;
          EXPECT_GE(measured, predicted) << name << ' ' << policy_name(policy) << ", rank " << r;
          EXPECT_LE(measured, predicted + under_way) << name << ' ' << policy_name(policy) << ", rank " << r;
        }
      }
    }
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
