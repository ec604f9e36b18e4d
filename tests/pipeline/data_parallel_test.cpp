// Tests the order of W for sums of gradients, and the end of replicas of which one fails. The sums are those of
// tests/train/data_parallel_test.cpp in every order of work.
#include <mutex>

#include "tests/pipeline/support.h"
#include "twobp/pipeline/executor/rank_executor.h"
#include "twobp/pipeline/gradient_reducer.h"
#include "twobp/pipeline/stage.h"
#include "twobp/transport/world.h"

namespace twobp::test {
namespace {

// This is the work of one pipeline in a step, by stage. "W2.1" is W of the probe before layer 2 for micro-batch 1.
struct Trace {
  std::mutex mutex;
  std::map<int, std::vector<std::string>> by_stage;

  void add(int stage, const std::string& what) {
    const std::lock_guard lock(mutex);
    by_stage[stage].push_back(what);
  }
};

// Runs four layers on two stages, with a probe before each layer.
std::map<int, std::vector<std::string>> ops_of(const std::string& schedule, int micro_batches, P2Policy policy,
                                               P2Order order, P2Batching batching = P2Batching::kLoop) {
  ModelSpec model = small_mlp(4);
  Trace trace;
  for (int layer = 3; layer >= 0; --layer) {
    auto hooks = insert_probe(model, layer);
    const int stage = layer / 2;
    hooks->backward_p1 = [&trace, layer, stage](const Context& context) {
      trace.add(stage, concat("I", layer, '.', context.micro_batch));
    };
    hooks->backward_p2 = [&trace, layer, stage](int64_t micro_batch) {
      trace.add(stage, concat("W", layer, '.', micro_batch));
    };
  }
  Pipeline pipeline(model, no_costs(model), options_of({4, 4}));
  const StepPlan plan = pipeline.plan(schedule, micro_batches, policy, {batching, 0, order});
  pipeline.run(plan, random_batch(micro_batches), step_request());
  return trace.by_stage;
}

TEST(P2Order, BucketRunsTheRemainingWLayerByLayer) {
  auto oldest = ops_of("gpipe", 2, P2Policy::kEnd, P2Order::kOldest);
  EXPECT_EQ(oldest[1], (std::vector<std::string>{"I3.0", "I2.0", "I3.1", "I2.1", "W3.0", "W2.0", "W3.1", "W2.1"}));
  EXPECT_EQ(oldest[0], (std::vector<std::string>{"I1.0", "I0.0", "I1.1", "I0.1", "W1.0", "W0.0", "W1.1", "W0.1"}));
  auto bucket = ops_of("gpipe", 2, P2Policy::kEnd, P2Order::kBucket);
  EXPECT_EQ(bucket[1], (std::vector<std::string>{"I3.0", "I2.0", "I3.1", "I2.1", "W3.0", "W3.1", "W2.0", "W2.1"}));
  // No rank waits for the first stage's dL/dx: its last I alternates with W, layer by layer.
  EXPECT_EQ(bucket[0], (std::vector<std::string>{"I1.0", "I0.0", "I1.1", "W1.0", "W1.1", "I0.1", "W0.0", "W0.1"}));
}

TEST(P2Order, StandardBackwardKeepsItsOrder) {
  for (const P2Order order : {P2Order::kOldest, P2Order::kBucket}) {
    auto ops = ops_of("1f1b", 2, P2Policy::kOff, order);
    for (int stage = 0; stage < 2; ++stage) {
      const std::string last = concat(2 * stage + 1);
      const std::string first = concat(2 * stage);
      std::vector<std::string> expected;
      for (const std::string mb : {".0", ".1"}) {
        for (const std::string& layer : {last, first}) {
          expected.push_back("I" + layer + mb);
          expected.push_back("W" + layer + mb);
        }
      }
      EXPECT_EQ(ops[stage], expected);
    }
  }
}

constexpr int kMicroBatches = 4;

// Makes a sum of all parameters that the pipeline's ranks train. The caller keeps the sums while it runs steps.
std::vector<std::unique_ptr<GradientReducer>> reducers_of(Pipeline& pipeline, int64_t bucket_bytes) {
  std::vector<std::unique_ptr<GradientReducer>> reducers(pipeline.ranks());
  pipeline.on_ranks([&](int rank) {
    std::vector<GradientReducer::Item> items;
    for (const auto& stage : pipeline.rank(rank).stages()) {
      for (int i = 0; i < stage->layer_count(); ++i) {
        for (Parameter* parameter : stage->parameters(i))
          items.push_back({parameter, stage->index(), i, stage->layer_name(i)});
      }
    }
    reducers[rank] = std::make_unique<GradientReducer>(*pipeline.world().data[rank], std::move(items), bucket_bytes);
    pipeline.rank(rank).sum_gradients_with(reducers[rank].get());
  });
  return reducers;
}

TEST(DataParallel, ConcatenatedWKeepsItsBitsLayerByLayer) {
  const ModelSpec model = small_mlp(4);
  const auto gradients = [&](P2Order order) {
    Pipeline pipeline(model, no_costs(model), options_of({2, 2}));
    const StepPlan plan = pipeline.plan("gpipe", kMicroBatches, P2Policy::kEnd, {P2Batching::kConcat, 0, order});
    pipeline.run(plan, random_batch(kMicroBatches), step_request());
    return take_gradients(pipeline);
  };
  // The first stage's last I alternates with W, although W of both micro-batches is one product.
  const auto ops = [](P2Order order) { return ops_of("gpipe", 2, P2Policy::kEnd, order, P2Batching::kConcat).at(0); };
  EXPECT_EQ(ops(P2Order::kOldest),
            (std::vector<std::string>{"I1.0", "I0.0", "I1.1", "I0.1", "W1.0", "W1.1", "W0.0", "W0.1"}));
  EXPECT_EQ(ops(P2Order::kBucket),
            (std::vector<std::string>{"I1.0", "I0.0", "I1.1", "W1.0", "W1.1", "I0.1", "W0.0", "W0.1"}));
  expect_same_bits(gradients(P2Order::kOldest), gradients(P2Order::kBucket));
}

TEST(DataParallel, AFailingReplicaEndsTheOthers) {
  for (const int failing : {0, 1}) {
    const std::string message = error_of([&] {
      run_worlds(make_in_process_worlds(2, 2, 0), [&](World world) {
        ModelSpec model = small_mlp(3);
        auto hooks = insert_probe(model, 1);
        const bool fails = world.replica == failing;
        hooks->backward_p1 = [fails](const Context& context) {
          if (fails && context.micro_batch % kMicroBatches == 2) fail("the probe fails");
        };
        Pipeline pipeline(model, no_costs(model), options_of({2, 2}), std::move(world));
        const auto reducers = reducers_of(pipeline, 1 << 20);
        StepRequest options = step_request();
        options.update = test::update_by([&](int rank) {
          reducers[rank]->finish(test::kTimeout);
          return std::vector<Waited>();
        });
        const StepPlan plan = pipeline.plan("1f1b", kMicroBatches, P2Policy::kFill);
        pipeline.run(plan, random_batch(kMicroBatches), options);
      });
    });
    expect_contains(message, {"the probe fails", "step 5"});
  }
}

}  // namespace
}  // namespace twobp::test
