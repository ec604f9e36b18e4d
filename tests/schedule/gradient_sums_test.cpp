// Tests sums of gradients over replicas, bucket by bucket, beside the remaining W. Some results are computed by hand,
// others are properties of all schedules.
#include <gtest/gtest.h>

#include "twobp/core/check.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp::TWOBP_FILE {
namespace {

// Makes a stage of `layers` layers. F, I and W of a layer take 1 each, and its gradients have 4 bytes.
StageCost stage_of(int layers) {
  StageCost cost;
  cost.forward = cost.backward_p1 = cost.backward_p2 = layers;
  cost.activation_bytes = cost.stash_bytes = 0;
  const LayerCost layer{.forward = 1, .backward_p1 = 1, .backward_p2 = 1, .p2_units = 1, .gradient_bytes = 4};
  cost.layers.assign(layers, layer);
  return cost;
}

SimulationOptions two_replicas(P2Order order, double bucket_bytes) {
  SimulationOptions options;
  options.p2_order = order;
  options.data_parallel.replicas = 2;
  options.data_parallel.latency = 0.5;
  options.data_parallel.bytes_per_second = 1;  // 4 seconds a layer
  options.data_parallel.bucket_bytes = bucket_bytes;
  return options;
}

// There are one rank, two layers and two micro-batches. All work is done at 12.
double exposed(P2Policy policy, const SimulationOptions& options) {
  const Simulation result = simulate(make_schedule("gpipe", 1, 2, policy), {stage_of(2)}, options);
  EXPECT_EQ(result.ranks[0].busy, 12);
  EXPECT_EQ(result.step_seconds, 12 + result.ranks[0].exposed);
  return result.ranks[0].exposed;
}

TEST(GradientSums, SumsABucketForEachLayer) {
  // The last layer is done at 11, the first at 12. The sums run from 11 to 15, and then to 19.
  EXPECT_EQ(exposed(P2Policy::kEnd, two_replicas(P2Order::kOldest, 1)), 7.5);
  // With the standard backward, the layers are done at 10 and 12.
  EXPECT_EQ(exposed(P2Policy::kOff, two_replicas(P2Order::kOldest, 1)), 6.5);
  // I of the second micro-batch's last layer ends at 7. W of that layer for both micro-batches ends at 9, the rest at
  // 12.
  EXPECT_EQ(exposed(P2Policy::kEnd, two_replicas(P2Order::kBucket, 1)), 5.5);
}

// W of the last layer interrupts the last I, for both micro-batches.
TEST(GradientSums, RunWWithinTheLastI) {
  const Simulation result =
      simulate(make_schedule("gpipe", 1, 2, P2Policy::kEnd), {stage_of(2)}, two_replicas(P2Order::kBucket, 1));
  std::string text;
  for (const SimulatedOp& op : result.ranks[0].timeline) {
    text +=
        concat(op_name(op.op), op.micro_batch, op.part > 0 ? concat(" part ", op.part) : "", " at ", op.begin, ", ");
  }
  EXPECT_EQ(text, "F0 at 0, F1 at 2, I0 at 4, I1 at 6, W0 at 7, W1 at 8, I1 part 1 at 9, W0 at 10, W1 at 11, ");
}

// Its last I ends at 10, and all W at 14. W of the last layer, for both micro-batches, ends at 12. Without this order
// it ends at 13. Then the two sums take 4 each.
TEST(GradientSums, RunTheWOfOtherRanksLayerByLayer) {
  const auto of_rank_1 = [](P2Order order) {
    return simulate(make_schedule("gpipe", 2, 2, P2Policy::kEnd), {stage_of(2), stage_of(2)}, two_replicas(order, 1))
        .ranks[1];
  };
  EXPECT_EQ(of_rank_1(P2Order::kOldest).exposed, 13 + 2 * 4 + 0.5 - 14);
  const RankSimulation rank = of_rank_1(P2Order::kBucket);
  EXPECT_EQ(rank.exposed, 12 + 2 * 4 + 0.5 - 14);
  std::string text;
  for (const SimulatedOp& op : rank.timeline) {
    if (op.op == Op::kBackwardP2) text += concat(op_name(op.op), op.micro_batch, " at ", op.begin, ", ");
  }
  EXPECT_EQ(text, "W0 at 10, W1 at 11, W0 at 12, W1 at 13, ");
}

// Seconds, milliseconds or any unit.
TEST(GradientSums, HaveNoUnitOfTime) {
  StageCost cost = stage_of(2);
  SimulationOptions options = two_replicas(P2Order::kOldest, 1);
  for (double* seconds : {&cost.forward, &cost.backward_p1, &cost.backward_p2, &options.data_parallel.latency})
    *seconds /= 1024;
  options.data_parallel.bytes_per_second *= 1024;
  const Schedule schedule = make_schedule("gpipe", 1, 2, P2Policy::kEnd);
  EXPECT_EQ(1024 * simulate(schedule, {cost}, options).ranks[0].exposed, 7.5);
}

TEST(GradientSums, OneBucketStartsWithItsLastLayer) {
  for (const P2Policy policy : {P2Policy::kOff, P2Policy::kEnd}) {
    EXPECT_EQ(exposed(policy, two_replicas(P2Order::kBucket, 5)), 8.5);
    EXPECT_EQ(exposed(policy, two_replicas(P2Order::kBucket, 1e9)), 8.5);
    SimulationOptions after = two_replicas(P2Order::kBucket, 1);
    after.data_parallel.overlap = false;
    EXPECT_EQ(exposed(policy, after), 8.5);
  }
}

TEST(GradientSums, LayersWithoutWAreDoneWithTheirI) {
  // Of three layers, the middle one has its gradient in I, and the last one has none.
  StageCost cost = stage_of(3);
  cost.backward_p2 = 2;
  cost.layers[1].p2_units = 0;
  cost.layers[2].gradient_bytes = 0;
  SimulationOptions options = two_replicas(P2Order::kBucket, 1);
  options.data_parallel.latency = 0;
  const Simulation result = simulate(make_schedule("gpipe", 1, 2, P2Policy::kEnd), {cost}, options);
  // F ends at 6 and the first I at 9. Then I ends at 10, two W at 12, and I at 13, so the middle layer's sum runs from
  // 13 to 17. Then I ends at 14 and two W at 16, so the first layer's sum runs from 17 to 21.
  EXPECT_EQ(result.ranks[0].busy, 16);
  EXPECT_EQ(result.ranks[0].exposed, 5);
}

// Only the replicas that hold the same experts sum their parts: with two of four sharing them, each sends half of two
// parts of 2 bytes, and half of the sum.
TEST(GradientSums, OfSharedExpertsAreOfTheirHolders) {
  StageCost cost = stage_of(2);
  for (LayerCost& layer : cost.layers) layer.expert_gradient = layer.gradient_bytes;
  SimulationOptions options = two_replicas(P2Order::kOldest, 1);
  const auto exposed = [&](int replicas, int experts, double bucket) {
    options.data_parallel.replicas = replicas;
    options.data_parallel.experts = experts;
    options.data_parallel.bucket_bytes = bucket;
    return simulate(make_schedule("gpipe", 1, 2, P2Policy::kEnd), {cost}, options).ranks[0].exposed;
  };
  EXPECT_EQ(exposed(4, 2, 1), 11 + 3 + 3 + 0.5 - 12);
  EXPECT_EQ(exposed(2, 2, 1), 0.5);
  cost.gradient_bytes = 8;
  EXPECT_EQ(exposed(4, 2, 0), 6.5);
  EXPECT_THROW(exposed(3, 2, 1), Error);
}

// A bucket is sent when it is full, even if it is the last. A last layer without gradients sends none.
TEST(GradientSums, FillsBucketsWithUnequalLayers) {
  StageCost cost = stage_of(3);
  cost.layers[0].gradient_bytes = 0;
  SimulationOptions options = two_replicas(P2Order::kBucket, 8);
  options.data_parallel.latency = 0;
  const Schedule schedule = make_schedule("gpipe", 1, 1, P2Policy::kOff);
  // With the standard backward, layers are done at 5, 7 and 9. The bucket of the last two is full at 7 and takes 8.
  EXPECT_EQ(simulate(schedule, {cost}, options).ranks[0].exposed, 7 + 8 - 9);
  options.data_parallel.bucket_bytes = 9;  // it is sent with the first layer, which adds no bytes
  EXPECT_EQ(simulate(schedule, {cost}, options).ranks[0].exposed, 7 + 8 - 9);
  cost.layers[0].gradient_bytes = 1;
  EXPECT_EQ(simulate(schedule, {cost}, options).ranks[0].exposed, 9);
}

TEST(GradientSums, WaitForNothingWithoutGradients) {
  StageCost cost = stage_of(2);
  for (LayerCost& layer : cost.layers) layer.gradient_bytes = 0;
  SimulationOptions options = two_replicas(P2Order::kBucket, 1);
  options.data_parallel.latency = 100;
  EXPECT_EQ(simulate(make_schedule("gpipe", 1, 2, P2Policy::kEnd), {cost}, options).ranks[0].exposed, 0);
}

// In a wait, W of a stage without remaining I comes first, layer by layer, so that its sums begin.
TEST(GradientSums, FillWaitsWithStagesThatHaveEnded) {
  // Rank 1 has stages 1 and 3. Stage 3 has ended while rank 1 waits for the gradient from stage 2.
  std::vector<StageCost> costs(4, stage_of(2));
  costs[2].backward_p1 = 8;
  const Schedule schedule = make_schedule("looped-bfs", 4, 2, P2Policy::kFill, 2);
  const auto order_of_w = [&](P2Order order, int replicas) {
    SimulationOptions options = two_replicas(order, 1);
    options.data_parallel.replicas = replicas;
    std::string text;
    const Simulation simulation = simulate(schedule, costs, options);
    for (const SimulatedOp& op : simulation.ranks[1].timeline) {
      if (op.op == Op::kBackwardP2) text += to_string({op.op, op.stage, op.micro_batch}) + " ";
    }
    return text;
  };
  EXPECT_EQ(order_of_w(P2Order::kOldest, 2).substr(0, 12), "3W0 3W1 1W0 ");
  EXPECT_EQ(order_of_w(P2Order::kBucket, 2).substr(0, 16), "3W0 3W1 3W0 3W1 ") << "the last layer of both first";
}

TEST(GradientSums, AStageWithoutLayersIsOneBucket) {
  StageCost cost;
  cost.gradient_bytes = 4;
  SimulationOptions options = two_replicas(P2Order::kBucket, 1);
  const Simulation result = simulate(make_schedule("gpipe", 1, 2, P2Policy::kEnd), {cost}, options);
  EXPECT_EQ(result.ranks[0].exposed, 4.5);
}

TEST(GradientSums, BucketOrderIsNeverSlowerThanTheOldest) {
  int better = 0;
  for (const std::string& name : schedule_names()) {
    const NamedSchedule& named = named_schedule(name);
    const P2Policy policy = named.places_p2 ? P2Policy::kPlaced : P2Policy::kFill;
    for (const int ranks : {2, 4}) {
      const int stages = ranks * usual_stages_per_rank(named.placement);
      const std::vector<StageCost> costs(stages, stage_of(3));
      const Schedule schedule = make_schedule(name, stages, 2 * ranks, policy);
      Simulation results[2];
      for (const P2Order order : {P2Order::kOldest, P2Order::kBucket})
        results[static_cast<int>(order)] = simulate(schedule, costs, two_replicas(order, 1));
      for (int rank = 0; rank < ranks; ++rank) {
        const RankSimulation& oldest = results[0].ranks[rank];
        const RankSimulation& bucket = results[1].ranks[rank];
        EXPECT_LE(bucket.exposed, oldest.exposed) << name << ", rank " << rank << " of " << ranks;
        EXPECT_NEAR(bucket.busy, oldest.busy, 1e-9);
        better += bucket.exposed < oldest.exposed ? 1 : 0;
      }
    }
  }
  EXPECT_GT(better, 10);
}

TEST(GradientSums, RefuseImpossibleSizes) {
  StageCost cost = stage_of(2);
  SimulationOptions options = two_replicas(P2Order::kBucket, -1);
  const Schedule schedule = make_schedule("gpipe", 1, 2, P2Policy::kEnd);
  EXPECT_THROW(simulate(schedule, {cost}, options), Error);
  cost.layers[0].gradient_bytes = -1;
  EXPECT_THROW(simulate(schedule, {cost}, two_replicas(P2Order::kBucket, 1)), Error);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
