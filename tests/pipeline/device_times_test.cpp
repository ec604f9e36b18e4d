// Tests that seconds by a device's own clock do not depend on the work of the host.
#include <gtest/gtest.h>

#include "tests/nn/device/stand_in_device.h"
#include "twobp/core/measure.h"
#include "twobp/pipeline/executor/accounts.h"

namespace twobp::TWOBP_FILE {
namespace {

constexpr double kLong = 0.03;

// Keeps the stream busy for `seconds`.
void work(const DeviceStream& stream, double seconds) {
  test::hold(stream, [seconds, begin = 0.0]() mutable {
    if (begin == 0) begin = now_seconds();
    return now_seconds() >= begin + seconds;
  });
}

TEST(DeviceTimes, AreEmptyOnACpu) {
  const Device cpu;
  DeviceTimes times;
  times.start(cpu, true);
  times.open(&StageTimes::forward, 0, IdleCause::kNothing);
  times.close();
  times.end_p2(0, times.begin());
  EXPECT_FALSE(times.any());
}

TEST(DeviceTimes, TellOpsFromWaits) {
  const Device device = test::stand_in_device(15);
  DeviceTimes times;
  times.start(device, true);
  work(device.compute(), kLong);  // a message
  times.open(&StageTimes::forward, 0, IdleCause::kNothing);
  work(device.compute(), kLong);
  times.pause();
  const DeviceEvent w = times.begin();
  work(device.compute(), kLong);
  times.end_p2(1, w);
  work(device.compute(), kLong);  // the clock is paused, so this counts as idle time
  times.resume();
  work(device.compute(), kLong);
  times.close();
  work(device.compute(), kLong);  // another message
  times.open(&StageTimes::backward_p1, 0, IdleCause::kMessage);
  work(device.compute(), kLong);
  times.close();
  EXPECT_TRUE(times.any());
  device.compute().wait_on_host();

  std::vector<StageTimes> stages(2);
  stages[1].forward = 7;  // the host's time
  const DeviceTimes::Totals totals = times.take(stages);
  EXPECT_FALSE(times.any());
  EXPECT_GE(stages[0].forward, 2 * kLong);
  EXPECT_GE(stages[0].backward_p1, kLong);
  EXPECT_GE(stages[1].backward_p2, kLong);
  EXPECT_EQ(stages[0].backward_p2, 0);
  EXPECT_EQ(stages[1].forward, 0);
  for (const IdleCause cause : {IdleCause::kStartUp, IdleCause::kNothing, IdleCause::kMessage})
    EXPECT_GE(totals.idle[static_cast<int>(cause)], kLong) << idle_cause_name(cause);
  EXPECT_NEAR(totals.busy, stages[0].forward + stages[0].backward_p1 + stages[1].backward_p2, 1e-9);
}

TEST(DeviceTimes, ReuseTheirEvents) {
  const Device device = test::stand_in_device(15);
  DeviceTimes times;
  int made = 0;
  for (int step = 0; step < 3; ++step) {
    times.start(device, true);
    for (int i = 0; i < 20; ++i) {
      times.open(&StageTimes::forward, 0, IdleCause::kNothing);
      times.close();
      times.end_p2(0, times.begin());
    }
    device.compute().wait_on_host();
    std::vector<StageTimes> stages(1);
    times.take(stages);
    EXPECT_GE(stages[0].forward, 0);
    if (step == 0) made = test::timed_events();
  }
  EXPECT_EQ(test::timed_events(), made);
}

TEST(DeviceTimes, OmitAStepThatIsRecorded) {
  const Device device = test::stand_in_device(15);
  DeviceTimes times;
  times.start(device, false);
  times.open(&StageTimes::forward, 0, IdleCause::kNothing);
  times.close();
  EXPECT_FALSE(times.any());
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
