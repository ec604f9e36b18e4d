// Tests the bytes of a step against bytes counted by hand. The model has MLP blocks: y = x + down(silu(gate)
// * up), (gate | up) = gate_up(norm(x)). With R rows, width D and hidden width H, one block holds these floats for one
// micro-batch:
//   after F:  norm(x) (R D, until W), 1 / rms (R), gate and up (2 R H), silu(gate) * up (R H, until W),
//             and its input x (R D), which belongs to the previous block or to the batch;
//   after I:  norm(x) (R D), d(gate | up) (2 R H, written over gate and up), silu(gate) * up (R H), dy (R D).
#include "tests/pipeline/step_bytes.h"
#include "twobp/pipeline/stage.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::kDim;
using test::kFloat;
using test::kHidden;
using test::kMessage;
using test::kSaved;
using test::kStash;
using test::options_of;
using test::random_batch;
using test::small_mlp;
using test::step_request;
using Category = MemoryCategory;

constexpr int64_t kWeights = (kDim + 2 * kHidden * kDim + kDim * kHidden) * kFloat;  // of a block

int64_t bytes(const MemoryUse& use, Category category) {
  return use.now[static_cast<int>(category)];
}

// Runs one step with p2 `end`. All W run after the last I.
void run(Pipeline& pipeline, int micro_batches, const char* schedule = "gpipe") {
  pipeline.run(pipeline.plan(schedule, micro_batches, P2Policy::kEnd, {P2Batching::kLoop, 0}),
               random_batch(micro_batches), step_request());
}

TEST(StepMemory, CountsParametersAndGradients) {
  const ModelSpec model = small_mlp(5);
  Pipeline pipeline(model, test::no_costs(model), options_of({2, 3}));
  for (const auto& [stage, layers] : {std::pair{0, 2}, {1, 3}}) {
    const MemoryUse use = pipeline.meter().stage_use(stage);
    EXPECT_EQ(bytes(use, Category::kParameters), layers * kWeights);
    EXPECT_EQ(bytes(use, Category::kGradients), layers * kWeights);
    EXPECT_EQ(use.total(), 2 * layers * kWeights);
    EXPECT_EQ(use.peak, 2 * layers * kWeights) << "making weights needs no more than the weights";
  }
}

// Three blocks and the loss are on one stage. The bytes are those before the last block runs, when two blocks are
// saved.
TEST(StepMemory, CountsActivationsAfterForward) {
  ModelSpec model = small_mlp(4);
  const auto probe = test::insert_probe(model, 3);
  Pipeline pipeline(model, test::no_costs(model), options_of({5}));
  std::vector<int64_t> activations, stash;
  probe->forward = [&](const Context&) {
    const MemoryUse use = pipeline.meter().stage_use(0);
    activations.push_back(bytes(use, Category::kActivations));
    stash.push_back(bytes(use, Category::kStash));
  };
  run(pipeline, 2);
  ASSERT_EQ(activations.size(), 2U);
  // The first block's x belongs to the batch. The x of each other block is the output of the previous block. The third
  // block's output is in use.
  const int64_t three_blocks = 3 * kSaved + 3 * kMessage;
  EXPECT_EQ(activations[0], three_blocks);
  // The first micro-batch is complete. It holds the last block without its output, the loss's difference, and x of the
  // last block.
  const int64_t whole = 4 * kSaved + 3 * kMessage + kMessage;
  EXPECT_EQ(activations[1], whole + three_blocks);
  EXPECT_EQ(stash, (std::vector<int64_t>{0, 0}));
}

// The bytes at the first layer's I are the tensors that the later blocks keep for W, and the gradient in use.
TEST(StepMemory, CountsTheStashAfterBackwardP1) {
  ModelSpec model = small_mlp(3);
  const auto probe = test::insert_probe(model, 0);
  Pipeline pipeline(model, test::no_costs(model), options_of({4}));
  std::vector<int64_t> activations, stash;
  probe->backward_p1 = [&](const Context&) {
    const MemoryUse use = pipeline.meter().stage_use(0);
    activations.push_back(bytes(use, Category::kActivations));
    stash.push_back(bytes(use, Category::kStash));
  };
  run(pipeline, 2);
  EXPECT_EQ(stash, (std::vector<int64_t>{3 * kStash, 6 * kStash}));
  // Micro-batch 1 still has its activations after I of micro-batch 0, and none later. dL/dx is in use each time.
  const int64_t whole = 3 * kSaved + 2 * kMessage + kMessage;
  EXPECT_EQ(activations, (std::vector<int64_t>{whole + kMessage, kMessage}));
}

// A received message belongs to the receiver. The sender keeps nothing of it.
TEST(StepMemory, MovesTensorsOverTheBoundary) {
  ModelSpec model = small_mlp(3);
  const auto second = test::insert_probe(model, 1);  // first layer of stage 1
  const auto first = test::insert_probe(model, 0);   // first layer of stage 0
  Pipeline pipeline(model, test::no_costs(model), options_of({2, 3}));
  MemoryUse sender, receiver, back;
  second->forward = [&](const Context&) {
    sender = pipeline.meter().stage_use(0);
    receiver = pipeline.meter().stage_use(1);
  };
  first->backward_p1 = [&](const Context&) { back = pipeline.meter().stage_use(0); };
  run(pipeline, 1);
  EXPECT_EQ(bytes(sender, Category::kActivations), kSaved);
  EXPECT_EQ(bytes(receiver, Category::kActivations), kMessage);
  // dL/dy came from stage 1 and is kept for W.
  EXPECT_EQ(bytes(back, Category::kStash), kStash);
  EXPECT_EQ(bytes(back, Category::kActivations), kMessage);
}

// Stages on one rank hand over tensors without a message. The meter still names the stage that holds each tensor.
TEST(StepMemory, MovesTensorsBetweenStagesOfOneRank) {
  ModelSpec model = small_mlp(3);
  const auto second = test::insert_probe(model, 1);
  Pipeline pipeline(model, test::no_costs(model), options_of({1, 3}, {0, 0}));
  MemoryUse sender, receiver;
  second->forward = [&](const Context&) {
    sender = pipeline.meter().stage_use(0);
    receiver = pipeline.meter().stage_use(1);
  };
  Schedule schedule;
  schedule.name = "one rank";
  schedule.stages = 2;
  schedule.rank_of_stage = {0, 0};
  schedule.ranks = {{{Op::kForward, 0, 0}, {Op::kForward, 1, 0}, {Op::kBackward, 1, 0}, {Op::kBackward, 0, 0}}};
  const StepPlan plan = pipeline.plan(test::finished(schedule, P2Policy::kEnd), {P2Batching::kLoop, 0});
  pipeline.run(plan, random_batch(1), step_request());
  EXPECT_EQ(bytes(sender, Category::kActivations), kSaved);
  EXPECT_EQ(bytes(receiver, Category::kActivations), kMessage);
}

void expect_nothing_held(Pipeline& pipeline, int64_t layers, const std::string& after) {
  int64_t total = 0;
  for (int s = 0; s < pipeline.stages(); ++s) {
    const MemoryUse use = pipeline.meter().stage_use(s);
    EXPECT_EQ(bytes(use, Category::kActivations), 0) << after << ", stage " << s;
    EXPECT_EQ(bytes(use, Category::kStash), 0) << after << ", stage " << s;
    total += use.total();
  }
  for (int r = 0; r < pipeline.ranks(); ++r) EXPECT_EQ(pipeline.meter().held(r), 0) << after << ", rank " << r;
  EXPECT_EQ(total, 2 * layers * kWeights) << after;
}

TEST(StepMemory, HoldsNothingAfterAStepOrAnEvaluation) {
  const ModelSpec model = small_mlp(6);
  for (const std::vector<int>& split : {std::vector<int>{6}, {2, 4}, {1, 2, 3}}) {
    Pipeline pipeline(model, test::no_costs(model), options_of(split));
    StepRequest evaluation = step_request();
    evaluation.training = false;
    for (const char* schedule : {"naive", "gpipe", "1f1b"}) {
      for (const P2Policy policy : {P2Policy::kOff, P2Policy::kEnd, P2Policy::kCooldown, P2Policy::kFill}) {
        for (const P2Batching batching : {P2Batching::kLoop, P2Batching::kConcat}) {
          const std::string name = concat(schedule, " ", policy_name(policy), " ", batching_name(batching));
          pipeline.run(pipeline.plan(schedule, 3, policy, {batching}), random_batch(3), step_request());
          expect_nothing_held(pipeline, 6, name);
        }
      }
    }
    evaluation.step = -1;
    pipeline.run(pipeline.forward_plan(3), random_batch(3), evaluation);
    expect_nothing_held(pipeline, 6, "evaluation");
  }
}

// An evaluation keeps nothing for a backward pass. Its peak is the tensors of one block and the memory for adding them.
TEST(StepMemory, AnEvaluationSavesNothing) {
  ModelSpec model = small_mlp(4);
  const auto probe = test::insert_probe(model, 3);
  Pipeline pipeline(model, test::no_costs(model), options_of({5}));
  std::vector<int64_t> held;
  probe->forward = [&](const Context&) { held.push_back(pipeline.meter().held(0)); };
  StepRequest options = step_request();
  options.training = false;
  pipeline.run(pipeline.forward_plan(3), random_batch(3), options);
  EXPECT_EQ(held, (std::vector<int64_t>(3, kMessage))) << "the block's input and nothing else";
}

// A LLaMa keeps only one thing between steps: the tables of the rotary embedding, which are cos and sin of (S, D / 2)
// per layer.
TEST(StepMemory, ALlamaHoldsOnlyItsRotaryTables) {
  const ModelSpec model = test::small_llama(3);  // 8 layers; layers 1, 3 and 5 are attention
  Pipeline pipeline(model, test::no_costs(model), options_of({3, 5}));
  const int64_t tables = 2 * test::kSequence * 2 * kFloat;  // heads are 4 wide
  StepRequest evaluation = step_request();
  evaluation.training = false;
  for (const bool training : {true, false, true}) {
    StepRequest options = training ? step_request() : evaluation;
    pipeline.run(training ? pipeline.plan("1f1b", 3, P2Policy::kFill) : pipeline.forward_plan(3), random_batch(3),
                 options);
    EXPECT_EQ(pipeline.meter().held(0), tables);
    EXPECT_EQ(pipeline.meter().held(1), 2 * tables);
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
