// Tests parallel pipelines that sum their gradients during their backward passes, and the order of W that supports
// this.
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

struct Case {
  std::string schedule;
  P2Policy policy;
  P2Batching batching = P2Batching::kLoop;
  P2Order order = P2Order::kBucket;
  int64_t bucket_bytes = 1 << 20;
  int64_t cap = 0;
};

std::string describe(const Case& c) {
  return concat(c.schedule, ", ", policy_name(c.policy), ", ", batching_name(c.batching),
                c.order == P2Order::kBucket ? ", bucket, " : ", oldest, ", c.bucket_bytes, " B");
}

PipelineOptions placed(const std::string& schedule, const ModelSpec& model) {
  const NamedSchedule& named = named_schedule(schedule);
  const int stages = 2 * usual_stages_per_rank(named.placement);
  const int layers = static_cast<int>(model.layers.size());
  std::vector<int> split(stages, layers / stages);
  split.back() += layers % stages;
  return options_of(split, place_stages(named.placement, stages, 2));
}

// Returns the gradients of one replica alone. Its micro-batches are those of the global batch from `first` on.
std::vector<at::Tensor> alone(const ModelSpec& model, const Case& c, int first, int count) {
  Pipeline pipeline(model, no_costs(model), placed(c.schedule, model));
  StepRequest options = step_request();
  options.first_micro_batch = first;
  const std::vector<Fields> all = random_batch(first + count);
  const StepPlan plan = pipeline.plan(c.schedule, count, c.policy, {c.batching, c.cap, c.order});
  pipeline.run(plan, {all.begin() + first, all.end()}, options);
  return take_gradients(pipeline);
}

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

// Returns the gradients by replica.
std::vector<std::vector<at::Tensor>> together(const ModelSpec& model, const Case& c, int replicas) {
  std::vector<std::vector<at::Tensor>> gradients(replicas);
  run_worlds(make_in_process_worlds(replicas, 2, 0), [&](World world) {
    const int replica = world.replica;
    Pipeline pipeline(model, no_costs(model), placed(c.schedule, model), std::move(world));
    const auto reducers = reducers_of(pipeline, c.bucket_bytes);
    StepRequest options = step_request();
    options.first_micro_batch = replica * kMicroBatches;
    options.update = test::update_by([&](int rank) {
      reducers[rank]->finish(test::kTimeout);
      return std::vector<Waited>();
    });
    const std::vector<Fields> all = random_batch((replica + 1) * kMicroBatches);
    const std::vector<Fields> own(all.end() - kMicroBatches, all.end());
    const StepPlan plan = pipeline.plan(c.schedule, kMicroBatches, c.policy, {c.batching, c.cap, c.order});
    for (int step = 0; step < 2; ++step) {  // the second step finds the same state as the first
      options.step = 5 + step;
      pipeline.run(plan, own, options);
      gradients[replica] = take_gradients(pipeline);
    }
    for (int rank = 0; rank < 2; ++rank) pipeline.rank(rank).sum_gradients_with(nullptr);
  });
  return gradients;
}

TEST(DataParallel, GradientsAreTheSumOfTheReplicasInEveryOrderOfWork) {
  const ModelSpec model = small_llama(3);
  std::vector<Case> cases;
  for (const std::string schedule : {"1f1b", "gpipe"}) {
    for (const P2Policy policy : {P2Policy::kOff, P2Policy::kEnd, P2Policy::kCooldown, P2Policy::kFill}) {
      for (const P2Order order : {P2Order::kOldest, P2Order::kBucket}) {
        cases.push_back({schedule, policy, P2Batching::kLoop, order, policy == P2Policy::kEnd ? 1 : 4000});
      }
    }
  }
  cases.push_back({"interleaved-1f1b", P2Policy::kFill});
  cases.push_back({"interleaved-1f1b", P2Policy::kOff, P2Batching::kLoop, P2Order::kBucket, 2000});
  cases.push_back({"zb-v", P2Policy::kPlaced, P2Batching::kLoop, P2Order::kBucket, 3000});
  cases.push_back({"zb-v", P2Policy::kFill, P2Batching::kLoop, P2Order::kOldest, 3000});
  for (const int replicas : {2, 3}) {
    std::vector<at::Tensor> expected;
    for (int replica = 0; replica < replicas; ++replica) {
      const auto one = alone(model, {"1f1b", P2Policy::kOff}, replica * kMicroBatches, kMicroBatches);
      for (size_t i = 0; i < one.size(); ++i) {
        if (replica == 0) {
          expected.push_back(one[i]);
        } else {
          expected[i] = expected[i] + one[i];
        }
      }
    }
    for (const Case& c : cases) {
      SCOPED_TRACE(concat(replicas, " replicas, ", describe(c)));
      for (const auto& gradients : together(model, c, replicas)) expect_same_bits(expected, gradients);
    }
  }
}

TEST(DataParallel, ConcatenatedWKeepsItsBitsLayerByLayer) {
  const ModelSpec model = small_mlp(4);
  const Case oldest{"gpipe", P2Policy::kEnd, P2Batching::kConcat, P2Order::kOldest};
  const Case bucket{"gpipe", P2Policy::kEnd, P2Batching::kConcat, P2Order::kBucket};
  // The first stage's last I alternates with W, although W of both micro-batches is one product.
  const auto ops = [](P2Order order) { return ops_of("gpipe", 2, P2Policy::kEnd, order, P2Batching::kConcat).at(0); };
  EXPECT_EQ(ops(P2Order::kOldest),
            (std::vector<std::string>{"I1.0", "I0.0", "I1.1", "I0.1", "W1.0", "W1.1", "W0.0", "W0.1"}));
  EXPECT_EQ(ops(P2Order::kBucket),
            (std::vector<std::string>{"I1.0", "I0.0", "I1.1", "W1.0", "W1.1", "I0.1", "W0.0", "W0.1"}));
  expect_same_bits(alone(model, oldest, 0, kMicroBatches), alone(model, bucket, 0, kMicroBatches));
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
        Pipeline pipeline(model, no_costs(model), placed("1f1b", model), std::move(world));
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
