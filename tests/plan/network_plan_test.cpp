// Plans over networks other than the measured one, and with replicas.
#include <algorithm>

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

// 1F1B on 4 ranks of 2 layers, F = 2, I + W = 4: a message of 0.5 each way is in the warm-up and the end.
TEST(NetworkPlan, LinksTakeTheirTime) {
  const CostModel model = equal_layers();
  PlanRequest request = one_way("gpipe");
  const double free = plan(model, request).best[0].step_seconds;
  EXPECT_NEAR(free, (8 + 3) * 6.0, 1e-9);
  request.interconnect.link = LinkSpeed{0.5, 0};
  EXPECT_NEAR(plan(model, request).best[0].step_seconds, free + 2 * 3 * 0.5, 1e-9);
  // 2 bytes a message: 4 a second makes another 0.5, which the next message does not wait for.
  request.interconnect.link = LinkSpeed{0.5, 4};
  EXPECT_NEAR(plan(model, request).best[0].step_seconds, free + 2 * 3 * 1.0, 1e-9);
}

TEST(NetworkPlan, OnlyWhatLeavesANodeIsShared) {
  const CostModel model = equal_layers();
  PlanRequest request = one_way("gpipe");
  const double free = plan(model, request).best[0].step_seconds;
  request.interconnect.ranks_per_node = 2;
  request.interconnect.node = LinkSpeed{0.5, 0};
  EXPECT_NEAR(plan(model, request).best[0].step_seconds, free + 2 * 0.5, 1e-9) << "one boundary of three";
  // Ranks alone in their nodes: rank 1 sends F and dL/dx over one link, 4 seconds each, which do not fit into
  // the 6 that it works on a micro-batch; a link for each does.
  request = one_way("1f1b");
  request.interconnect.link = LinkSpeed{0, 2.0 / 4};
  const double own = plan(model, request).best[0].step_seconds;
  request.interconnect.ranks_per_node = 1;
  request.interconnect.node = request.interconnect.link;
  EXPECT_GT(plan(model, request).best[0].step_seconds, own + 1);
}

// Each stage has 20 bytes of gradients (2 layers of 10): a ring of 4 over 5 bytes a second takes 1.5 x 4 = 6.
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
  // A layer a bucket: the first half goes out while the lower layer's I and W, 2 seconds, run.
  request.interconnect.bucket_bytes = 10;
  EXPECT_NEAR(plan(model, request).best[0].step_seconds, alone.step_seconds + 4, 1e-9);
  request.interconnect.bucket_bytes = 20;
  // Without a speed of its own it is the link's out of a node, or between ranks.
  request.interconnect.data.reset();
  EXPECT_NEAR(plan(model, request).best[0].step_seconds, alone.step_seconds, 1e-9);
  request.interconnect.ranks_per_node = 4;
  request.interconnect.node = LinkSpeed{0, 5};
  EXPECT_NEAR(plan(model, request).best[0].step_seconds, alone.step_seconds + 6, 1e-9);
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
  request.ranks = {3};
  expect_contains(error_of([&] { plan(model, request); }), {"3 ranks", "8 devices"});
  request.data_parallel = {0};
  expect_contains(error_of([&] { plan(model, request); }), {"replicas", "at least 1"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
