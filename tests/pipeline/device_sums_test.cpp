// Tests sums of gradients over replicas on devices: they wait for W, and computations do not wait for them. The second
// replica's W takes long.
#include <array>
#include <atomic>

#include <gtest/gtest.h>

#include "tests/nn/device/stand_in_device.h"
#include "twobp/pipeline/gradient_reducer.h"
#include "twobp/transport/threads/in_process.h"

namespace twobp::TWOBP_FILE {
namespace {

TEST(DeviceSums, WaitForWAndLetComputationsPass) {
  const std::vector<Device> devices = {test::stand_in_device(20), test::stand_in_device(21)};
  const auto replicas = make_in_process_transports(2, 0, devices);
  std::atomic<bool> open = false;
  std::array<std::atomic<int>, 2> computations{};
  std::vector<Parameter> weights;
  std::vector<std::unique_ptr<GradientReducer>> reducers;
  for (int replica = 0; replica < 2; ++replica) weights.emplace_back("w", at::zeros({30, 7}));
  for (int replica = 0; replica < 2; ++replica) {
    const Device& device = devices[replica];
    const OnStream here(device.compute());
    Parameter& weight = weights[replica];
    weight.allocate_value(1);
    weight.move_to(device.where());
    weight.allocate_grad();
    reducers.push_back(std::make_unique<GradientReducer>(
        *replicas[replica], std::vector<GradientReducer::Item>{{&weight, 0, 0, "layer"}}, 1 << 20, device));
    if (replica == 1) test::hold(device.compute(), [&] { return open.load(); });
    weight.accumulate(at::full({30, 7}, 2 + replica, weight.grad.options()));
    reducers[replica]->layer_done(0, 0);
    test::put(device.compute(), [&, replica] { ++computations[replica]; });
  }
  const auto progress = [&] {
    for (int i = 0; i < 10; ++i) {
      test::let_run();
      for (int replica = 0; replica < 2; ++replica) {
        const OnStream here(devices[replica].compute());
        reducers[replica]->progress();
        test::put(devices[replica].compute(), [&, replica] { ++computations[replica]; });
      }
    }
    test::let_run();
  };
  progress();
  EXPECT_EQ(computations[0], 11) << "F and I wait for no sum";
  EXPECT_EQ(computations[1], 0) << "W is not done";
  EXPECT_TRUE(reducers[0]->busy()) << "the other replica's W is not done";
  open = true;
  progress();
  for (int replica = 0; replica < 2; ++replica) {
    const OnStream here(devices[replica].compute());
    reducers[replica]->finish(60);
    EXPECT_TRUE(weights[replica].grad.cpu().eq(5).all().item<bool>()) << weights[replica].grad.cpu()[0][0];
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
