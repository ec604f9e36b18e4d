// Tests where W runs on devices, whose hosts run ahead of them: at the waits of the simulated step, or earlier if the
// device has nothing else to do. The costs are made up.
#include <algorithm>
#include <atomic>
#include <thread>

#include "tests/nn/device/stand_in_device.h"
#include "tests/pipeline/step_bytes.h"
#include "twobp/pipeline/profile/profile.h"
#include "twobp/schedule/simulate/for_training.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::measured_peaks;
using test::step_request;

constexpr int kMicroBatches = 6;

struct Cut {
  std::vector<int> split;
  std::string schedule = "1f1b";
  std::vector<int> rank_of_stage = {};
};

const std::vector<Cut>& cuts() {
  static const std::vector<Cut> cuts = {{{2, 2, 2, 2}},       {{1, 1, 6}},
                                        {{5, 2, 1}},          {{1, 5, 2}},
                                        {{3, 3, 2}, "gpipe"}, {{2, 2, 2, 2}, "interleaved-1f1b", {0, 1, 0, 1}}};
  return cuts;
}

std::vector<Device> devices_of(const Cut& cut) {
  std::vector<Device> devices;
  for (size_t stage = 0; stage < cut.split.size(); ++stage)
    devices.push_back(test::stand_in_device(30 + static_cast<int>(stage)));
  if (!cut.rank_of_stage.empty()) devices.resize(2);
  return devices;
}

// The bytes are those of the device. Each op of a layer takes a second, W `p2_seconds`.
Pipeline on_devices(const Cut& cut, double p2_seconds = 1) {
  static const ModelSpec model = test::small_mlp(8);
  static const Profile measured = measure_profile(model, test::random_fields(1), 0.01, test::stand_in_device(30));
  const auto devices = devices_of(cut);
  Profile profile = measured;
  for (auto& [kind, layer] : profile) {
    layer.forward = layer.backward_p1 = 1;
    layer.backward_p2 = p2_seconds;
  }
  const auto ranks = static_cast<int>(devices.size());
  return Pipeline(model, profile, test::options_of(cut.split, cut.rank_of_stage),
                  std::move(make_thread_worlds(1, ranks, {}, devices).front()));
}

// F, I and each piece of W, as "F0.3".
using Order = std::vector<std::string>;

std::vector<Order> simulated(const Pipeline& pipeline, const StepPlan& plan) {
  SimulationOptions options = in_process_simulation(plan.caps);
  options.timeline = true;
  const Simulation simulation = simulate(plan.schedule, profiled_costs(pipeline.layer_costs()), options);
  std::vector<Order> orders;
  for (const auto& rank : recorded_order(simulation)) {
    Order& order = orders.emplace_back();
    for (const RecordedOp& op : rank)
      order.insert(order.end(), std::max(1, op.pieces), concat(op_name(op.op), op.stage, '.', op.micro_batch));
  }
  return orders;
}

std::vector<Order> launched(Pipeline& pipeline, const StepPlan& plan) {
  StepRequest input = step_request();
  input.want_events = true;
  const StepReport report = pipeline.run(plan, test::random_batch(plan.schedule.micro_batches), input);
  std::vector<Order> orders;
  for (const auto& events : report.events) {
    Order& order = orders.emplace_back();
    for (const Event& event : events) {
      if (event.kind > Event::Kind::kBackwardP2 || event.part > 0) continue;
      const Op op = event.kind == Event::Kind::kForward      ? Op::kForward
                    : event.kind == Event::Kind::kBackwardP1 ? Op::kBackwardP1
                                                             : Op::kBackwardP2;
      order.push_back(concat(op_name(op), event.stage, '.', event.micro_batch));
    }
  }
  return orders;
}

// Forgets the gradients of the step before.
std::vector<at::Tensor> gradients_on_host(Pipeline& pipeline) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& gradient : test::take_gradients(pipeline)) gradients.push_back(gradient.cpu());
  return gradients;
}

bool is_w(const std::string& op) {
  return op.starts_with("W");
}

Order without_w(Order order) {
  std::erase_if(order, is_w);
  return order;
}

// How many W come before each F and I.
std::vector<int> w_before(const Order& order) {
  std::vector<int> before;
  int count = 0;
  for (const std::string& op : order) is_w(op) ? void(++count) : before.push_back(count);
  return before;
}

// W may come earlier than simulated, where a device was idle, but never later.
TEST(P2Places, RanksLaunchTheSimulatedOrderOrWEarlier) {
  for (const Cut& cut : cuts()) {
    for (const double p2_seconds : {0.3, 1.0, 4.0}) {
      Pipeline pipeline = on_devices(cut, p2_seconds);
      for (const int micro_batches : {kMicroBatches, kMicroBatches - 2, kMicroBatches}) {
        const StepPlan plan =
            pipeline.plan(cut.schedule, micro_batches, P2Policy::kFill, {P2Batching::kLoop, MemoryCap::none()});
        SCOPED_TRACE(concat(cut.schedule, ", W of ", p2_seconds, " s, ", micro_batches, " micro-batches"));
        const std::vector<Order> runs = launched(pipeline, plan), expected = simulated(pipeline, plan);
        ASSERT_EQ(runs.size(), expected.size());
        for (size_t rank = 0; rank < runs.size(); ++rank) {
          EXPECT_EQ(runs[rank].size(), expected[rank].size());
          ASSERT_EQ(without_w(runs[rank]), without_w(expected[rank]));
          const std::vector<int> actual = w_before(runs[rank]), least = w_before(expected[rank]);
          for (size_t i = 0; i < least.size(); ++i) EXPECT_GE(actual[i], least[i]) << rank << ", F or I " << i;
        }
        gradients_on_host(pipeline);
      }
    }
  }
}

// The last rank has more work than the others, so it never waits between its first F and its last I.
TEST(P2Places, ARankThatNeverWaitsHasItsWLast) {
  const Pipeline pipeline = on_devices({{1, 1, 6}});
  const StepPlan plan = pipeline.plan("1f1b", kMicroBatches, P2Policy::kFill, {P2Batching::kLoop, MemoryCap::none()});
  ASSERT_EQ(plan.w_places.size(), 3);
  EXPECT_EQ(*std::ranges::max_element(plan.w_places[2]), 0);
  EXPECT_GT(*std::ranges::max_element(plan.w_places[0]), 0) << "the first rank waits";
}

// By its places, the last rank of the same cut runs W at its end. Here it has to wait for the rank before it, which
// goes on only when the last rank has run a unit.
TEST(P2Places, AnIdleDeviceGetsTheNextUnit) {
  ModelSpec model = test::small_mlp(8);
  const auto devices = devices_of({{1, 1, 6}});
  std::atomic<int> units = 0;
  bool waited = false;
  test::insert_probe(model, 7)->backward_p2 = [&](int64_t) { ++units; };
  test::insert_probe(model, 1)->forward = [&](const Context& context) {
    if (context.micro_batch != 3) return;
    const double end = now_seconds() + test::kTimeout / 2;
    while (units == 0 && now_seconds() < end) std::this_thread::yield();
    waited = units > 0;
  };
  Profile profile = measure_profile(model, test::random_fields(1), 0.01, devices[0]);
  units = 0;
  for (auto& [kind, layer] : profile) layer.forward = layer.backward_p1 = layer.backward_p2 = 1;
  Pipeline pipeline(model, profile, test::options_of({1, 2, 7}),
                    std::move(make_thread_worlds(1, 3, {}, devices).front()));
  const StepPlan plan = pipeline.plan("1f1b", kMicroBatches, P2Policy::kFill, {P2Batching::kLoop, MemoryCap::none()});
  ASSERT_EQ(*std::ranges::max_element(plan.w_places[2]), 0);
  pipeline.run(plan, test::random_batch(kMicroBatches), step_request());
  EXPECT_TRUE(waited) << "the device was idle, W was pending, and no unit ran";
}

TEST(P2Places, GiveTheSameBits) {
  for (const Cut& cut : cuts()) {
    SCOPED_TRACE(cut.schedule);
    std::vector<at::Tensor> expected;
    for (const double p2_seconds : {0.3, 4.0}) {
      Pipeline pipeline = on_devices(cut, p2_seconds);
      for (const P2Policy policy : {P2Policy::kOff, P2Policy::kFill, P2Policy::kEnd}) {
        for (const MemoryCap& cap : {MemoryCap::none(), MemoryCap::automatic()}) {
          pipeline.run(pipeline.plan(cut.schedule, kMicroBatches, policy, {P2Batching::kLoop, cap}),
                       test::random_batch(kMicroBatches), step_request());
          const auto actual = gradients_on_host(pipeline);
          if (expected.empty()) expected = actual;
          test::expect_same_bits(expected, actual);
        }
      }
    }
  }
}

// Messages in transit are beyond the cap, with p2 off, too. They are less than the W of one block.
TEST(P2Places, StayUnderTheCap) {
  constexpr int64_t kUnderWay = kMicroBatches * test::kMessage;
  static_assert(kUnderWay < test::kStash);
  int limited = 0;
  for (const Cut& cut : cuts()) {
    SCOPED_TRACE(cut.schedule);
    Pipeline pipeline = on_devices(cut);
    const StepPlan plan = pipeline.plan(cut.schedule, kMicroBatches, P2Policy::kFill);
    const auto caps = plan.caps;
    const auto peaks = measured_peaks(pipeline, plan);
    const auto free = measured_peaks(
        pipeline, pipeline.plan(cut.schedule, kMicroBatches, P2Policy::kFill, {P2Batching::kLoop, MemoryCap::none()}));
    for (size_t rank = 0; rank < caps.size(); ++rank) EXPECT_LE(peaks[rank], caps[rank] + kUnderWay) << rank;
    limited += peaks != free;
  }
  EXPECT_GT(limited, 0) << "no cap was in the way";
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
