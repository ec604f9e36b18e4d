// Tests training with weights, activations and gradients on a device other than a CPU. Here it is the stand-in, with
// streams and events. Only LibTorch's operators may touch its memory. The bits are those of the same operators on a
// CPU.
#include <set>

#include <ATen/DeviceAccelerator.h>
#include <gtest/gtest.h>

#include "tests/every_way.h"
#include "tests/nn/device/stand_in_device.h"
#include "tests/train/checkpoint_runs.h"
#include "tests/train/helpers.h"
#include "tests/train/resnet_training.h"
#include "tests/train/training.h"
#include "twobp/core/measure.h"
#include "twobp/nn/kernels/rows/operators.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/train/build_model.h"
#include "twobp/transport/world.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_same_bits;
using test::Outcome;

constexpr const char* kStandIn = "privateuseone";

Config config_of(const char* model, int stages, const char* device, const char* precision = "fp32") {
  const bool resnet = std::string_view(model) == "resnet";
  Config config = resnet ? test::tiny_resnet("basic", /*small_images=*/false) : test::tiny_config();
  const std::string_view type = model;
  if (type == "mamba") test::make_mamba(config).state = 5;
  if (type == "mlp") {
    test::make_mlp(config);
    config.data.synthetic = "vectors";
  }
  if (type == "bert") test::make_bert(config, test::kSequence, 0.2).tied = true;
  config.pipeline.stages = stages;
  config.pipeline.device = device;
  config.train.precision = precision;
  config.train.clip_norm = 0.5;
  return config;
}

std::vector<Batch> batches_of(const Config& config, int steps, int micro_batches) {
  if (config.model.type.name() == "mlp") {
    std::vector<Batch> batches(steps);
    for (Batch& batch : batches) {
      batch.targets = batch.tokens = 2 * micro_batches;
      for (int m = 0; m < micro_batches; ++m) {
        const auto random = [&] { return at::randn({2, test::kSequence, config.model.input().width}); };
        batch.micro_batches.push_back({{"input", random()}, {"target", random()}});
      }
    }
    return batches;
  }
  return config.model.type.name() == "resnet" ? test::image_batches(config, steps, micro_batches)
                                              : test::random_batches(steps, micro_batches);
}

bool is_here(std::string_view device) {
  return device != "cuda" || at::hasCUDA();
}

// Expects the same bits on any number of stages and for every schedule, p2 policy and cap. Of other models than LLaMa,
// two ways run.
void expect_always(const Outcome& expected, const char* model, const char* device, const std::vector<Batch>& batches,
                   const char* precision = "fp32") {
  const std::string_view type = model;
  const bool all = type == "llama" || test::every_way() || device != std::string_view(kStandIn);
  const size_t first = type == "bert" ? 0 : type == "mamba" ? 1 : 2;
  const std::vector<std::tuple<int, const char*, P2Policy, const char*>> ways = {
      {1, "gpipe", P2Policy::kOff, "auto"}, {2, "1f1b", P2Policy::kOff, "auto"},
      {2, "1f1b", P2Policy::kFill, "auto"}, {3, "zb-h1", P2Policy::kPlaced, "auto"},
      {2, "1f1b", P2Policy::kFill, "0"},    {3, "gpipe", P2Policy::kEnd, "0"}};
  for (size_t i = all ? 0 : first; i < ways.size(); i += all ? 1 : 3) {
    const auto& [stages, schedule, policy, cap] = ways[i];
    Config config = config_of(model, stages, device, precision);
    config.pipeline.memory_cap = cap;
    const Outcome actual = test::train(config, batches, {schedule, policy, P2Batching::kLoop, parse_memory_cap(cap)});
    expect_same_bits(expected, actual, concat(schedule, ' ', policy_name(policy), ", ", stages, " stages, cap ", cap));
  }
}

class OnDevice : public ::testing::TestWithParam<const char*> {};

TEST_P(OnDevice, TrainsToTheBitsOfTheOperatorsOnACpu) {
  constexpr int kMicroBatches = 4;
  const auto batches = batches_of(config_of(GetParam(), 1, "cpu"), 3, kMicroBatches);
  const auto expected = [&] {
    const OperatorsEverywhere operators;
    return test::train(config_of(GetParam(), 1, "cpu"), batches, {"gpipe", P2Policy::kOff});
  }();
  for (const int stages : {1, 2, 3}) {
    Trainer trainer(config_of(GetParam(), stages, kStandIn));
    for (const Parameter* parameter : trainer.weights()) {
      ASSERT_EQ(parameter->value.device().type(), at::kPrivateUse1) << parameter->name();
      if (!parameter->trainable()) continue;  // running statistics
      ASSERT_EQ(parameter->grad.device().type(), at::kPrivateUse1) << parameter->name();
    }
  }
  expect_always(expected, GetParam(), kStandIn, batches);
}

// Each gradient is applied when it is complete, and leaves the device's memory.
TEST_P(OnDevice, StreamsGradientsToTheSameBits) {
  for (const char* device : {kStandIn, "cuda"}) {
    if (!is_here(device)) continue;
    Config config = config_of(GetParam(), 2, device);
    config.train.clip_norm = 0;
    const auto batches = batches_of(config, 3, 4);
    const Outcome kept = test::train(config, batches, {"1f1b", P2Policy::kFill});
    config.pipeline.gradients = "streamed";
    for (const int stages : {1, 2}) {
      config.pipeline.stages = stages;
      expect_same_bits(kept, test::train(config, batches, {"1f1b", P2Policy::kFill}), concat(stages, " stages"));
      Trainer trainer(config);
      for (const Batch& batch : batches) trainer.step(batch, {"1f1b", P2Policy::kFill});
      for (const Parameter* parameter : trainer.weights()) {
        const bool tied = parameter->name() == "bert.embeddings.word_embeddings.weight";
        EXPECT_EQ(parameter->grad.defined(), tied) << parameter->name();
      }
    }
  }
}

// W repeats F and I, and puts back what F changes: the running statistics of a ResNet.
TEST(OnDeviceTest, RecomputesAResnetInW) {
  const auto batches = batches_of(config_of("resnet", 1, "cpu"), 3, 4);
  for (const char* device : {kStandIn, "cuda"}) {
    if (!is_here(device)) continue;
    const auto expected = [&] {
      const OperatorsEverywhere operators;
      // The products of a GPU round differently.
      const char* const place = device == std::string_view("cuda") ? "cuda" : "cpu";
      return test::train(config_of("resnet", 1, place), batches, {"gpipe", P2Policy::kOff});
    }();
    for (const char* cap : {"auto", "0"}) {
      Config config = config_of("resnet", 2, device);
      config.pipeline.recompute = {"both"};
      config.pipeline.memory_cap = cap;
      check_config(config);
      const Outcome actual =
          test::train(config, batches, {"1f1b", P2Policy::kFill, P2Batching::kLoop, parse_memory_cap(cap)});
      expect_same_bits(expected, actual, concat(device, ", cap ", cap));
    }
  }
}

// The kernels of a GPU draw another mask of attention than a CPU.
Config without_dropout_of_attention(Config config) {
  if (config.model.type.name() == "bert") config.model.type.as<BertOptions>().attention_dropout = 0;
  return config;
}

// The device's matrix products round differently from a CPU's.
TEST_P(OnDevice, TrainsToTheSameBitsOnAGpuWhateverTheSchedule) {
  if (!is_here("cuda")) GTEST_SKIP() << "needs a GPU, and a LibTorch for it";
  const auto batches = batches_of(config_of(GetParam(), 1, "cpu"), 3, 4);
  const auto run = [&](const Config& config) {
    const OperatorsEverywhere operators;
    return test::train(config, batches, {"gpipe", P2Policy::kOff});
  };
  const Outcome on_gpu = run(without_dropout_of_attention(config_of(GetParam(), 1, "cuda")));
  const Outcome on_cpu = run(without_dropout_of_attention(config_of(GetParam(), 1, "cpu")));
  for (size_t i = 0; i < on_cpu.losses.size(); ++i) EXPECT_NEAR(on_gpu.losses[i], on_cpu.losses[i], 1e-3);
  expect_always(run(config_of(GetParam(), 1, "cuda")), GetParam(), "cuda", batches);
}

INSTANTIATE_TEST_SUITE_P(Models, OnDevice, ::testing::Values("llama", "bert", "mamba", "resnet"),
                         [](const auto& info) { return std::string(info.param); });

// Products of 16-bit types, and attention by FlashAttention.
TEST_P(OnDevice, TrainsToTheSameBitsInBFloat16OnAGpu) {
  if (!is_here("cuda")) GTEST_SKIP() << "needs a GPU, and a LibTorch for it";
  const auto batches = batches_of(config_of(GetParam(), 1, "cpu"), 3, 4);
  const auto run = [&](const Config& config) { return test::train(config, batches, {"gpipe", P2Policy::kOff}); };
  const Outcome on_gpu = run(without_dropout_of_attention(config_of(GetParam(), 1, "cuda", "bf16")));
  const Outcome on_cpu = run(without_dropout_of_attention(config_of(GetParam(), 1, "cpu", "bf16")));
  for (size_t i = 0; i < on_cpu.losses.size(); ++i)
    EXPECT_NEAR(on_gpu.losses[i], on_cpu.losses[i], 0.02 * on_cpu.losses[i]);
  expect_always(run(config_of(GetParam(), 1, "cuda", "bf16")), GetParam(), "cuda", batches, "bf16");
}

// Two blocks of a model of 7B: workspaces of libraries, which the meter does not count, are small beside them.
TEST(OnGpu, TheMeterSeesTheAllocatorsBytes) {
  if (!is_here("cuda")) GTEST_SKIP() << "needs a GPU, and a LibTorch for it";
  c10::DeviceAllocator& allocator = *at::getDeviceAllocator(at::kCUDA);
  for (const P2Policy policy : {P2Policy::kOff, P2Policy::kFill}) {
    Config config = config_of("llama", 1, "cuda", "bf16");
    test::llama_of(config).dim = 4096;
    test::llama_of(config).layers = 2;
    test::llama_of(config).heads = test::llama_of(config).kv_heads = 32;
    test::llama_of(config).hidden = 11008;
    test::llama_of(config).vocab = 512;
    config.data.sequence = 1024;
    config.pipeline.micro_batch_size = 1;
    config.pipeline.micro_batches = 4;
    config.pipeline.p2 = std::string(policy_name(policy));
    const auto bytes = [&] { return allocator.getDeviceStats(0).allocated_bytes.front(); };
    const int64_t before = bytes().current;  // workspaces of another trainer's streams
    Trainer trainer(config);
    trainer.step();
    allocator.resetPeakStats(0);
    const StepResult result = trainer.step();
    const auto seen = static_cast<double>(result.report.rank_memory.front().peak);
    const double ratio = static_cast<double>(bytes().peak - before) / seen;
    std::printf("%s: the allocator's peak is %.4f of the meter's, %.2f GiB\n", std::string(policy_name(policy)).c_str(),
                ratio, seen / (1 << 30));
    EXPECT_NEAR(ratio, 1, 0.02) << policy_name(policy);
  }
}

// The costs that the planner needs, measured on the device that the configuration names.
TEST(OnDeviceTest, MeasuresCosts) {
  for (const char* device : {kStandIn, "cuda"}) {
    if (!is_here(device)) continue;
    MeasureOptions options;
    options.seconds = 0.01;
    const CostModel costs = measure_costs(config_of("llama", 1, device), options);
    const CostModel on_cpu = measure_costs(config_of("llama", 1, "cpu"), options);
    for (const auto& [kind, cost] : costs.kinds) {
      EXPECT_GT(cost.at_size.front().forward, 0) << kind;
      EXPECT_GT(cost.optimizer_seconds, 0) << kind;
      EXPECT_EQ(cost.optimizer_bytes, on_cpu.kinds.at(kind).optimizer_bytes) << kind;
    }
    EXPECT_NE(costs.made_on.find(device == std::string_view("cuda") ? "NVIDIA" : "stand-in"), std::string::npos)
        << costs.made_on;
  }
}

// There is no cap. Under a cap, the moment of W depends on the bytes held, and sums over other micro-batches round
// differently.
TEST(OnDeviceTest, Concatenates) {
  const auto batches = test::random_batches(3, 4);
  const auto run = [&](const char* device) {
    return test::train(config_of("llama", 2, device), batches,
                       {"gpipe", P2Policy::kEnd, P2Batching::kConcat, /*memory_cap=*/0});
  };
  const auto expected = [&] {
    const OperatorsEverywhere operators;
    return run("cpu");
  }();
  expect_same_bits(expected, run(kStandIn), "concat");
}

// All ranks share a device, or all but the last. From the third step on, a step is one call, on other batches than the
// recorded one.
std::unique_ptr<Trainer> trainer_with_graphs(Config config, int ranks, bool apart = false) {
  config.pipeline.graphs = true;
  std::vector<Device> devices;
  const std::string& kind = config.pipeline.device;
  for (int rank = 0; rank < ranks; ++rank) {
    const int other = apart && rank + 1 == ranks ? 1 : 0;
    devices.push_back(kind == kStandIn ? test::stand_in_device(7 + other) : Device::open(kind, other));
  }
  return std::make_unique<Trainer>(config, std::move(make_in_process_worlds(1, ranks, 0, devices).front()));
}

// Makes the numbers of targets differ, so that every step has another weight of the loss.
std::vector<Batch> unlike(std::vector<Batch> batches) {
  std::set<int64_t> seen;
  for (Batch& batch : batches) {
    while (!seen.insert(batch.targets).second) ++batch.targets;
  }
  return batches;
}

void expect_same_weights(const Trainer& actual, const Trainer& expected) {
  for (size_t i = 0; i < actual.weights().size(); ++i) {
    const Parameter& weight = *actual.weights()[i];
    EXPECT_TRUE(at::equal(weight.master.cpu(), expected.weights()[i]->master.cpu())) << weight.name();
  }
}

class AsGraph : public ::testing::TestWithParam<std::tuple<const char*, const char*>> {};

TEST_P(AsGraph, TrainsToTheSameBits) {
  const auto [model, device] = GetParam();
  if (!is_here(device)) GTEST_SKIP() << "needs a GPU, and a LibTorch for it";
  const auto batches = unlike(batches_of(config_of(model, 1, "cpu"), 4, 4));
  for (const auto& [stages, schedule, policy, apart] :
       {std::tuple{1, "gpipe", P2Policy::kOff, false}, std::tuple{2, "1f1b", P2Policy::kFill, false},
        std::tuple{2, "1f1b", P2Policy::kFill, true}, std::tuple{3, "gpipe", P2Policy::kEnd, false},
        std::tuple{3, "zb-h1", P2Policy::kPlaced, true}}) {
    SCOPED_TRACE(concat(schedule, ' ', policy_name(policy), ", ", stages, " stages", apart ? " apart" : ""));
    if (apart && device != std::string_view(kStandIn)) continue;  // there may be no second GPU
    const Config config = config_of(model, stages, device);
    Trainer one_by_one(config);
    const auto as_graph = trainer_with_graphs(config, stages, apart);
    const Variant variant{schedule, policy};
    const int replays = test::replays();
    for (const Batch& batch : batches) {
      const StepResult expected = one_by_one.step(batch, variant);
      const StepResult actual = as_graph->step(batch, variant);
      EXPECT_EQ(expected.loss, actual.loss) << "step " << actual.step;
      EXPECT_EQ(expected.grad_norm, actual.grad_norm) << "step " << actual.step;
      EXPECT_TRUE(expected.report.timed());
      EXPECT_EQ(actual.report.timed(), actual.step == 1) << "only the first is not put in as a graph";
      EXPECT_EQ(std::isnan(actual.report.mean_idle()), actual.step != 1);
    }
    EXPECT_EQ(test::replays() - replays, device == std::string_view(kStandIn) ? 3 : 0) << "all steps but the first";
    expect_same_weights(*as_graph, one_by_one);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, AsGraph,
                         ::testing::Combine(::testing::Values("llama", "mamba", "resnet", "mlp"),
                                            ::testing::Values(kStandIn, "cuda")),
                         [](const auto& info) {
                           return concat(std::get<0>(info.param), '_', std::get<1>(info.param));
                         });

// The gradient's scale begins too high, and is halved after each step that overflows.
TEST(AsGraphTest, ReadsTheScaleOfEachStep) {
  constexpr int kSteps = 6;
  Config config = config_of("llama", 2, kStandIn, "fp16");
  config.train.loss_scale = 0x1p22;
  const auto batches = test::random_batches(kSteps, 4);
  Trainer one_by_one(config);
  const auto as_graph = trainer_with_graphs(config, 2);
  const Variant variant{"1f1b", P2Policy::kFill};
  const int replays = test::replays();
  int skipped = 0;
  for (const Batch& batch : batches) {
    const StepResult expected = one_by_one.step(batch, variant);
    const StepResult actual = as_graph->step(batch, variant);
    SCOPED_TRACE(concat("step ", actual.step));
    EXPECT_EQ(expected.loss, actual.loss);
    EXPECT_EQ(expected.loss_scale, actual.loss_scale);
    EXPECT_EQ(expected.skipped, actual.skipped);
    if (!expected.skipped) {
      EXPECT_EQ(expected.grad_norm, actual.grad_norm);
    }
    skipped += expected.skipped ? 1 : 0;
  }
  EXPECT_GE(skipped, 2) << "the scale also changes after the recording";
  EXPECT_LT(skipped, kSteps - 1);
  EXPECT_EQ(test::replays() - replays, kSteps - 1) << "all steps but the first";
  expect_same_weights(*as_graph, one_by_one);
}

// A recorded step takes each batch's own mask.
TEST(AsGraphTest, HonoursMasks) {
  for (const char* model : {"llama", "mamba"}) {
    SCOPED_TRACE(model);
    const Config config = config_of(model, 2, kStandIn);
    const auto batches = test::padded(batches_of(config_of(model, 1, "cpu"), 3, 4));
    Trainer one_by_one(config);
    const auto as_graph = trainer_with_graphs(config, 2);
    const Variant variant{"1f1b", P2Policy::kFill};
    const int replays = test::replays();
    for (const Batch& batch : batches) {
      EXPECT_EQ(one_by_one.step(batch, variant).loss, as_graph->step(batch, variant).loss);
    }
    EXPECT_EQ(test::replays() - replays, 2) << "all steps but the first";
  }
}

// The last stage is on a GPU of its own, whose stream is held up until the other one has had time for all that it can
// do of a replay. The labels are copied in that stream, and the replay waits for them.
TEST(AsGraphTest, WaitsForInputsOnOtherDevices) {
  const Config config = config_of("llama", 2, kStandIn);
  Trainer one_by_one(config);
  const auto as_graph = trainer_with_graphs(config, 2, /*apart=*/true);
  const Variant variant{"1f1b", P2Policy::kFill};
  const int replays = test::replays();
  for (const Batch& batch : test::random_batches(4, 2)) {
    const double expected = one_by_one.step(batch, variant).loss;
    if (const int before = test::replays(); before > replays) {  // the graph is recorded
      double launched = 0;
      test::hold(as_graph->world().device(1).compute(), [=]() mutable {
        if (launched == 0 && test::replays() > before) launched = now_seconds();
        return launched > 0 && now_seconds() > launched + 0.3;
      });
    }
    EXPECT_EQ(as_graph->step(batch, variant).loss, expected);
  }
  EXPECT_EQ(test::replays() - replays, 3) << "all steps but the first";
}

// A recording begins in the stream of rank 0. Here, rank 1 has the first stage, so it computes before it receives
// anything that would make its stream a part of the recording.
TEST(AsGraphTest, RecordsRanksThatReceiveNothingFirst) {
  const test::TempFolder folder;
  const std::string file = folder.write("schedule.csv", ",1F0,1B0,1F1,1B1\n0F0,0F1,0B0,,0B1\n");
  Config config = config_of("llama", 0, kStandIn);
  config.pipeline.schedule = file;
  const auto batches = test::random_batches(4, 2);
  Trainer one_by_one(config);
  const auto as_graph = trainer_with_graphs(config, 2);
  const Variant variant{file, P2Policy::kFill};
  const int replays = test::replays();
  for (const Batch& batch : batches) {
    const StepResult expected = one_by_one.step(batch, variant);
    const StepResult actual = as_graph->step(batch, variant);
    EXPECT_EQ(expected.loss, actual.loss);
    EXPECT_EQ(expected.grad_norm, actual.grad_norm);
  }
  EXPECT_EQ(test::replays() - replays, 3) << "all steps but the first";
}

// A recorded step cannot contain some changes: other sizes, another plan. These changes are noticed. A step that comes
// only once is not recorded. Another number of targets is no such change.
TEST(AsGraphTest, RecordsAgainAfterAChange) {
  const Config config = config_of("llama", 2, kStandIn);
  Trainer one_by_one(config);
  const auto as_graph = trainer_with_graphs(config, 2);
  const auto same = [&](const Batch& batch, const Variant& variant) {
    EXPECT_EQ(one_by_one.step(batch, variant).loss, as_graph->step(batch, variant).loss);
  };
  const Variant fill{"1f1b", P2Policy::kFill};
  const int before = test::replays();
  for (const Batch& batch : test::random_batches(3, 4)) same(batch, fill);
  Batch fewer_targets = test::random_batches(1, 4).front();
  const at::Tensor& labels = fewer_targets.micro_batches[1].at("labels");
  fewer_targets.targets -= test::counted(labels);
  labels.fill_(-100);
  for (int i = 0; i < 2; ++i) same(fewer_targets, fill);
  for (const Batch& batch : test::random_batches(3, 2)) same(batch, fill);
  for (const Batch& batch : test::random_batches(3, 4)) same(batch, {"gpipe", P2Policy::kEnd});
  EXPECT_EQ(test::replays() - before, 4 + 2 + 2);
  same(fewer_targets, fill);
  EXPECT_EQ(test::replays() - before, 8);
  EXPECT_EQ(one_by_one.steps_done(), as_graph->steps_done());
}

// The host checks where documents begin.
TEST(AsGraphTest, RefusesDocuments) {
  const auto trainer = trainer_with_graphs(config_of("llama", 2, kStandIn), 2);
  std::vector<Batch> batches = test::random_batches(2, 4);
  for (Batch& batch : batches) {
    for (Fields& fields : batch.micro_batches) fields["document_starts"] = at::zeros_like(fields.at("input_ids"));
  }
  const Variant variant{"1f1b", P2Policy::kFill};
  trainer->step(batches[0], variant);
  test::expect_error([&] { trainer->step(batches[1], variant); }, {"pipeline.graphs", "several documents"});
}

TEST_P(OnDevice, OperatorsAreCloseToTheKernels) {
  const Config config = config_of(GetParam(), 1, "cpu");
  const auto batches = batches_of(config, 3, 2);
  const Outcome kernels = test::train(config, batches, {"gpipe", P2Policy::kOff});
  const OperatorsEverywhere operators;
  const Outcome other = test::train(config, batches, {"gpipe", P2Policy::kOff});
  for (size_t i = 0; i < kernels.losses.size(); ++i) EXPECT_NEAR(kernels.losses[i], other.losses[i], 1e-3);
  EXPECT_NE(kernels.losses, other.losses) << "the same bits: were the operators used?";
}

TEST(OnDeviceTest, EvaluatesToTheSameBits) {
  const auto evaluation = [](const char* device) {
    Config config = config_of("llama", 2, device);
    config.data.held_out = 4;
    Trainer trainer(config);
    return trainer.evaluate().value();
  };
  const auto there = evaluation(kStandIn);
  const OperatorsEverywhere operators;
  EXPECT_EQ(there, evaluation("cpu"));
}

// The host reads them when the ranks have changed places, whatever is still in streams.
TEST(OnDeviceTest, LendsTheMeansOfItsWeights) {
  const auto batches = test::random_batches(2, 4);
  const auto run = [&](const char* device) {
    Config config = config_of("llama", 2, device);
    config.optimizer.average = 0.5;
    Trainer trainer(config);
    for (const Batch& batch : batches) trainer.step(batch, {"1f1b", P2Policy::kFill});
    Outcome outcome;
    trainer.with_averages([&] { outcome.weights = test::copies_of(trainer.weights()); });
    for (at::Tensor& weight : test::copies_of(trainer.weights())) outcome.weights.push_back(weight);
    return outcome;
  };
  const auto expected = [&] {
    const OperatorsEverywhere operators;
    return run("cpu");
  }();
  expect_same_bits(expected, run(kStandIn), "means, then weights");
}

// The seconds of F, I and W and the idle seconds are by the device's clock.
TEST(OnDeviceTest, CountsItsOwnTimes) {
  for (const P2Policy policy : {P2Policy::kOff, P2Policy::kFill}) {
    SCOPED_TRACE(policy_name(policy));
    Trainer trainer(config_of("llama", 2, kStandIn));
    const auto batches = test::random_batches(2, 4);
    trainer.step(batches[0], {"1f1b", policy});
    const StepReport report = trainer.step(batches[1], {"1f1b", policy}).report;
    for (const StageTimes& stage : report.stages) {
      EXPECT_GT(stage.forward, 0);
      EXPECT_GT(stage.backward_p1, 0);
      EXPECT_GT(stage.backward_p2, 0);
    }
    for (size_t r = 0; r < report.ranks.size(); ++r) {
      const RankTimes& rank = report.ranks[r];
      const StageTimes& stage = report.stages[r];
      const double ops = stage.forward + stage.backward_p1 + stage.backward_p2;
      EXPECT_GT(rank.busy, rank.optimizer);
      EXPECT_NEAR(rank.busy - rank.optimizer, ops, 1e-9) << "one stream";
      EXPECT_EQ(rank.products.seconds, 0) << "the host's";
      double all = rank.busy;
      for (const double idle : rank.idle) all += idle;
      EXPECT_LE(all, report.seconds() + 1e-9);
    }
  }
}

// The host reads the last rank's losses, and each rank's squares. It waits for a device once for all of them.
TEST(OnDeviceTest, ReadsOnceForAllParameters) {
  Trainer trainer(config_of("llama", 2, kStandIn));
  const auto batches = test::random_batches(2, 4);
  trainer.step(batches[0], {"1f1b", P2Policy::kFill});
  const int reads = test::host_reads();
  trainer.step(batches[1], {"1f1b", P2Policy::kFill});
  EXPECT_EQ(test::host_reads() - reads, 3);
}

// Ids, labels and masks are copied from pinned memory, so the host runs ahead of the device.
TEST_P(OnDevice, TheHostDoesNotWaitForInputs) {
  const Config config = config_of(GetParam(), 2, kStandIn);
  Trainer trainer(config);
  const auto batches = batches_of(config, 2, 4);
  trainer.step(batches[0], {"1f1b", P2Policy::kFill});
  const int copies = test::blocking_copies();
  trainer.step(batches[1], {"1f1b", P2Policy::kFill});
  EXPECT_EQ(test::blocking_copies(), copies);
}

TEST(OnDeviceTest, TheHostDoesNotWaitForDocuments) {
  Trainer trainer(config_of("llama", 2, kStandIn));
  std::vector<Batch> batches = test::random_batches(2, 4);
  for (Batch& batch : batches) {
    for (Fields& fields : batch.micro_batches) {
      at::Tensor& starts = fields["document_starts"] = at::zeros_like(fields.at("input_ids"));
      starts.narrow(1, 5, starts.size(1) - 5).fill_(5);
    }
  }
  trainer.step(batches[0], {"1f1b", P2Policy::kFill});
  const int copies = test::blocking_copies();
  trainer.step(batches[1], {"1f1b", P2Policy::kFill});
  EXPECT_EQ(test::blocking_copies(), copies);
}

// Masks are drawn in the rank's own stream, also if its kernels on a CPU would share them out among threads.
TEST(OnDeviceTest, DropsInItsStream) {
  const auto run = [](const char* device) {
    Config config = config_of("llama", 2, device);
    test::llama_of(config).dropout = 0.3;
    test::llama_of(config).attention_dropout = 0.2;
    config.pipeline.threads = 2;
    std::vector<Batch> batches(2);
    for (size_t step = 0; step < batches.size(); ++step) {
      for (int m = 0; m < 2; ++m)  // large enough for two threads
        batches[step].micro_batches.push_back(test::random_fields(40, 2 * step + m));
      for (const Fields& fields : batches[step].micro_batches)
        batches[step].targets += test::counted(fields.at("labels"));
    }
    return test::train(config, batches, {"1f1b", P2Policy::kFill});
  };
  const auto expected = [&] {
    const OperatorsEverywhere operators;
    return run("cpu");
  }();
  expect_same_bits(expected, run(kStandIn), "dropout");
}

// What libraries allocate for good belongs to no layer, and takes nothing of a cap.
TEST(OnDeviceTest, CountsNoWorkspaceOfLibraries) {
  Trainer trainer(config_of("llama", 2, kStandIn));
  for (const Batch& batch : test::random_batches(2, 4)) {
    const StepResult result = trainer.step(batch, {"1f1b", P2Policy::kFill});
    for (const MemoryUse& rank : result.report.rank_memory)
      EXPECT_LT(rank.held(), 4096) << "at most the tables of angles are held";
  }
}

class KindOnDevice : public ::testing::TestWithParam<test::Case> {};

// A checkpoint from the device continues there, and also on a CPU. With reduced precision it continues on the device
// only, because a CPU may compute its products in float32.
TEST_P(KindOnDevice, LeavesCheckpoints) {
  const test::TempFolder folder;
  Config here = test::checkpoint_config(folder);
  GetParam().change(here);
  Config there = here;
  there.pipeline.device = kStandIn;
  const test::RunResult whole = test::run(there);
  const std::string from_there = test::folder_with(folder, there, 3, "from_there");
  const std::string copy = test::folder_with(folder, there, 3, "copy");
  there.save.checkpoints = from_there;
  const test::RunResult again = test::run(there, /*resume=*/true);
  EXPECT_EQ(again.first_step, 3);
  test::expect_continues(whole, again, "resumed on the device");
  if (here.train.precision != "fp32") return;
  const OperatorsEverywhere operators;
  here.save.checkpoints = folder.path("here");
  test::expect_continues(whole, test::run(here), "from the start on a CPU");
  here.save.checkpoints = copy;
  test::expect_continues(whole, test::run(here, /*resume=*/true), "resumed on a CPU");
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, KindOnDevice,
    ::testing::ValuesIn(test::with_common_cases({{"Plain", [](Config&) {}},
                                                 {"Tied", [](Config& c) { test::llama_of(c).tied = true; }},
                                                 {"Recomputes", [](Config& c) { c.pipeline.recompute = {"both"}; }},
                                                 {"RunsAhead",
                                                  [](Config& c) {
                                                    c.pipeline.run_ahead = "on";
                                                    c.save.every = 3;
                                                  }}})),
    [](const auto& info) { return std::string(info.param.name); });

TEST(OnDeviceTest, RefusesWhatItCannotRun) {
  Config config = config_of("llama", 1, "cuda");
  config.pipeline.device = "cpu";
  config.pipeline.gpu_parts = true;
  test::expect_error([&] { check_config(config); }, {"pipeline.gpu_parts", "pipeline.device"});
  config.pipeline.gpu_parts = false;
  const auto expect_no_graphs = [](Config with, const std::string& reason) {
    with.pipeline.graphs = true;
    test::expect_error([&] { check_config(with); }, {"pipeline.graphs", reason});
  };
  expect_no_graphs(config, "pipeline.device");
  config.pipeline.device = "cuda";
  config.pipeline.run_ahead = "on";
  expect_no_graphs(config, "pipeline.run_ahead");
  config.pipeline.run_ahead = "auto";
  expect_no_graphs(config_of("bert", 1, "cuda"), "model.type");
  Config drops = config_of("llama", 1, "cuda");
  test::llama_of(drops).dropout = 0.1;
  expect_no_graphs(drops, "other masks in every step");
  Config replicas = config_of("llama", 1, "cuda");
  replicas.pipeline.data_parallel = 2;
  expect_no_graphs(replicas, "pipeline.data_parallel");
  if (!at::hasCUDA()) test::expect_error([&] { Trainer trainer(config); }, {"no cuda", "pipeline.device = \"cpu\""});
  config.pipeline.device = "toaster";
  test::expect_error([&] { Trainer trainer(config); }, {"no device is called 'toaster'"});
  config = config_of("llama", 2, kStandIn);
  test::expect_error([&] { Trainer trainer(config, std::move(make_in_process_worlds(1, 2, 0).front())); },
                     {"pipeline.device", kStandIn});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
