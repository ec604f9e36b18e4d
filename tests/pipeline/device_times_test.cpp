// Seconds by a device's own clock, whatever the host does meanwhile.
#include "twobp/pipeline/device_times.h"

#include <chrono>
#include <thread>

#include <gtest/gtest.h>

#include "tests/nn/device/stand_in_device.h"

namespace twobp {
namespace {

constexpr double kLong = 0.03;

// Keeps the stream busy for `seconds`.
void work(const DeviceStream& stream, double seconds) {
  test::put(stream, [seconds] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); });
}

TEST(DeviceTimes, EmptyOnACpu) {
  const Device cpu;
  DeviceTimes times;
  times.start(cpu, true);
  times.end(&StageTimes::forward, 0, cpu.compute(), times.begin(cpu.compute()));
  EXPECT_FALSE(times.any());
}

TEST(DeviceTimes, OpsBesideEachOtherAreBusyOnce) {
  const Device device = test::stand_in_device(15);
  DeviceTimes times;
  times.start(device, true);
  work(device.compute(), kLong);  // a message
  const DeviceEvent f = times.begin(device.compute());
  device.weights().wait(f);
  const DeviceEvent w = times.begin(device.weights());
  work(device.weights(), kLong);
  times.end(&StageTimes::backward_p2, 1, device.weights(), w);
  device.compute().wait(device.weights().record());
  work(device.compute(), kLong);
  times.end(&StageTimes::forward, 0, device.compute(), f);
  work(device.compute(), kLong);  // another
  const DeviceEvent i = times.begin(device.compute());
  work(device.compute(), kLong);
  times.end(&StageTimes::backward_p1, 0, device.compute(), i);
  EXPECT_TRUE(times.any());
  device.compute().wait_on_host();

  std::vector<StageTimes> stages(2);
  stages[1].forward = 7;  // the host's
  const DeviceTimes::Totals totals = times.take(stages);
  EXPECT_FALSE(times.any());
  EXPECT_GE(stages[0].forward, 2 * kLong);
  EXPECT_GE(stages[0].backward_p1, kLong);
  EXPECT_GE(stages[1].backward_p2, kLong);
  EXPECT_EQ(stages[0].backward_p2, 0);
  EXPECT_EQ(stages[1].forward, 0);
  EXPECT_GE(totals.start_up, kLong);
  EXPECT_GE(totals.gaps, kLong);
  EXPECT_NEAR(totals.busy, stages[0].forward + stages[0].backward_p1, 1e-9) << "W is beside F";
}

TEST(DeviceTimes, NothingOfAStepThatIsRecorded) {
  const Device device = test::stand_in_device(15);
  DeviceTimes times;
  times.start(device, false);
  times.end(&StageTimes::forward, 0, device.compute(), times.begin(device.compute()));
  EXPECT_FALSE(times.any());
}

}  // namespace
}  // namespace twobp
