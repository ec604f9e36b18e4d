// Tests plans for networks other than the measured one, and plans with replicas.
#include <algorithm>
#include <tuple>

#include "tests/plan/support.h"
#include "twobp/plan/planner.h"
#include "twobp/schedule/named_schedules.h"

namespace twobp::TWOBP_FILE {
namespace {

PlanRequest one_way(const std::string& schedule) {
  PlanRequest request;
  request.ranks = {4};
  request.micro_batches = {8};
  request.micro_batch_sizes = {1};
  request.schedules = {schedule};
  request.policies = {P2Policy::kOff};
  request.recompute = {"none"};
  return request;
}

CostModel equal_layers() {
  return model_of(std::vector<TestKind>(8));
}

// There are 4 ranks of 2 layers, with F = 2 and I + W = 4. The warm-up and the end each have messages of 0.5 seconds.
TEST(NetworkPlan, LinksTakeTheirTime) {
  const CostModel model = equal_layers();
  PlanRequest request = one_way("gpipe");
  const double free = plan(model, request).best[0].step_seconds;
  EXPECT_NEAR(free, (8 + 3) * 6.0, 1e-9);
  request.interconnect.link = LinkSpeed{0.5, 0};
  EXPECT_NEAR(plan(model, request).best[0].step_seconds, free + 2 * 3 * 0.5, 1e-9);
  // A message has 2 bytes, so a speed of 4 bytes a second adds 0.5 seconds. The next message does not wait for them.
  request.interconnect.link = LinkSpeed{0.5, 4};
  EXPECT_NEAR(plan(model, request).best[0].step_seconds, free + 2 * 3 * 1.0, 1e-9);
}

TEST(NetworkPlan, SharesOnlyTheLinksThatLeaveANode) {
  const CostModel model = equal_layers();
  PlanRequest request = one_way("gpipe");
  const double free = plan(model, request).best[0].step_seconds;
  request.interconnect.ranks_per_node = 2;
  request.interconnect.node = LinkSpeed{0.5, 0};
  EXPECT_NEAR(plan(model, request).best[0].step_seconds, free + 2 * 0.5, 1e-9) << "one boundary of three";
  // Each rank is alone in its node. Rank 1 sends F and dL/dx over one link, 4 seconds each. They do not fit into its 6
  // seconds of work per micro-batch. With a link for each direction they would fit.
  request = one_way("1f1b");
  request.interconnect.link = LinkSpeed{0, 2.0 / 4};
  const double own = plan(model, request).best[0].step_seconds;
  request.interconnect.ranks_per_node = 1;
  request.interconnect.node = request.interconnect.link;
  EXPECT_GT(plan(model, request).best[0].step_seconds, own + 1);
}

// Each stage has 20 bytes of gradients (2 layers of 10). A ring of 4 at 5 bytes a second takes 1.5 x 4 = 6 seconds.
TEST(NetworkPlan, ReplicasSumTheirGradients) {
  const CostModel model = equal_layers();
  PlanRequest request = one_way("gpipe");
  const PlanChoice alone = plan(model, request).best[0];
  request.data_parallel = {1, 4};
  request.interconnect.data = LinkSpeed{0, 5};
  const PlanResult result = plan(model, request);
  ASSERT_EQ(result.best.size(), 2U);
  const PlanChoice& many = result.best[0];
  EXPECT_EQ(many.data_parallel, 4);
  EXPECT_NEAR(many.step_seconds, alone.step_seconds + 6, 1e-9) << "rank 0 is the last to finish";
  EXPECT_EQ(many.samples(), 4 * alone.samples());
  EXPECT_EQ(simulate_choice(model, many, request).step_seconds, many.step_seconds);
  EXPECT_EQ(result.best[1].step_seconds, alone.step_seconds);
  // Each layer is a bucket. The first half is sent while I and W of the lower layer run for 2 seconds.
  request.interconnect.bucket_bytes = 10;
  EXPECT_NEAR(plan(model, request).best[0].step_seconds, alone.step_seconds + 4, 1e-9);
  request.interconnect.bucket_bytes = 20;
  // Without a speed of their own, replicas use the link out of a node, or the link between ranks.
  request.interconnect.data.reset();
  EXPECT_NEAR(plan(model, request).best[0].step_seconds, alone.step_seconds, 1e-9);
  request.interconnect.ranks_per_node = 4;
  request.interconnect.node = LinkSpeed{0, 5};
  EXPECT_NEAR(plan(model, request).best[0].step_seconds, alone.step_seconds + 6, 1e-9);
}

// Groups of four replicas of two ranks: in one node, in two, and in four. What leaves a node takes the link out of it.
TEST(NetworkPlan, ExchangesOfExpertsTakeTheLinksOfTheirGroup) {
  const CostModel model = model_of({{}, {}});
  PlanRequest request;
  request.ranks = {2};
  request.data_parallel = {8};
  request.experts = 4;
  request.interconnect.link = LinkSpeed{0.1, 100};
  request.interconnect.node = LinkSpeed{0.5, 30};
  for (const auto& [ranks, latency, speed] :
       {std::tuple{16, 0.1, 100.0}, {8, 0.1, 100.0}, {4, 0.5, 45.0}, {12, 0.5, 45.0}, {2, 0.5, 30.0}, {1, 0.5, 30.0}}) {
    request.interconnect.ranks_per_node = ranks;
    const PlannedRun run = planned_run(model, plan(model, request).best.front(), request);
    EXPECT_EQ(run.options.data_parallel.experts, 4);
    EXPECT_DOUBLE_EQ(run.options.data_parallel.exchange_latency, latency) << ranks;
    EXPECT_DOUBLE_EQ(run.options.data_parallel.exchange_bytes_per_second, speed) << ranks;
    EXPECT_EQ(run.options.data_parallel.bytes_per_second, 30) << "of sums";
  }
}

// As in training: with replicas W runs in the order of the buckets.
TEST(NetworkPlan, OnlyReplicasOrderWByBucket) {
  const CostModel model = model_of({{}, {}});
  PlanRequest request;
  request.ranks = {2};
  for (const int replicas : {1, 2}) {
    request.data_parallel = {replicas};
    const PlannedRun run = planned_run(model, plan(model, request).best.front(), request);
    EXPECT_EQ(run.options.p2_order, replicas > 1 ? P2Order::kBucket : P2Order::kOldest);
    EXPECT_EQ(run.options.data_parallel.replicas, replicas);
  }
}

TEST(NetworkPlan, DevicesAreRanksTimesReplicas) {
  const CostModel model = equal_layers();
  PlanRequest request;
  request.ranks = {1, 2, 3, 4};
  request.devices = 8;
  request.batch = 16;
  request.schedules = {"1f1b"};
  request.micro_batches = {1, 2, 4, 8};
  request.top = 0;
  const PlanResult result = plan(model, request);
  ASSERT_FALSE(result.best.empty());
  std::vector<int> seen;
  for (const PlanChoice& choice : result.best) {
    EXPECT_EQ(choice.ranks * choice.data_parallel, 8);
    EXPECT_EQ(choice.samples(), 16);
    seen.push_back(choice.ranks);
  }
  for (const int ranks : {1, 2, 4}) EXPECT_EQ(std::count(seen.begin(), seen.end(), ranks) > 0, true) << ranks;
  request.devices = 2;
  request.ranks = {2};
  EXPECT_EQ(plan(model, request).best.at(0).data_parallel, 1) << "one pipeline on all devices";
  request.devices = 8;
  request.ranks = {3};
  expect_contains(error_of([&] { plan(model, request); }), {"3 ranks", "8 devices"});
  request.data_parallel = {0};
  expect_contains(error_of([&] { plan(model, request); }), {"replicas", "at least 1"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
