// Tests W beside F and I on a device: the dependences between the streams, and how far W may lag.
#include "twobp/pipeline/executor/p2_stream.h"

#include <atomic>

#include <gtest/gtest.h>

#include "tests/nn/device/stand_in_device.h"

namespace twobp::TWOBP_FILE {
namespace {

// This op holds up the stream on which it is launched until it is opened.
struct Gate {
  std::atomic<bool> open{false};
  void stand_in(const DeviceStream& stream) {
    test::hold(stream, [this] { return open.load(); });
  }
};

TEST(P2Stream, IsAPlainCallOnACpu) {
  P2Stream stream;
  EXPECT_FALSE(stream.wants_more());
  const DeviceEvent ready = stream.ready();
  Saved saved;
  Saved* const all[] = {&saved};
  int calls = 0;
  stream.run({&ready, 1}, all, [&] { ++calls; });
  EXPECT_EQ(calls, 1);
  stream.join();
}

TEST(P2Stream, WWaitsForItsOwnIOnly) {
  const Device device = test::stand_in_device(10);
  P2Stream stream(device);
  Gate first, second;
  std::atomic<int> done = 0;
  const auto w = [&] { test::put(device.weights(), [&] { ++done; }); };
  first.stand_in(device.compute());
  const DeviceEvent ready = stream.ready();
  second.stand_in(device.compute());  // the next F
  stream.run({&ready, 1}, {}, w);
  test::let_run();
  EXPECT_EQ(done, 0) << "its I is not done";
  first.open = true;
  test::let_run();
  EXPECT_TRUE(done == 1) << "W need not wait for later work";
  EXPECT_FALSE(device.compute().idle());
  second.open = true;
  device.compute().wait_on_host();
}

TEST(P2Stream, TheUpdateWaitsForAllW) {
  const Device device = test::stand_in_device(11);
  P2Stream stream(device);
  Gate gate;
  std::atomic<bool> updated = false;
  const DeviceEvent ready = stream.ready();
  stream.run({&ready, 1}, {}, [&] { gate.stand_in(device.weights()); });
  stream.join();
  test::put(device.compute(), [&] { updated = true; });
  test::let_run();
  EXPECT_FALSE(updated);
  gate.open = true;
  test::let_run();
  EXPECT_TRUE(updated.load()) << "all W is done";
}

TEST(P2Stream, LimitsTheDistanceBetweenHostAndW) {
  const Device device = test::stand_in_device(12);
  P2Stream stream(device);
  Gate gate;
  gate.stand_in(device.weights());
  const DeviceEvent ready = stream.ready();
  int ahead = 0;
  for (; ahead < 1000 && stream.wants_more(); ++ahead) stream.run({&ready, 1}, {}, [] {});
  EXPECT_GE(ahead, 2);
  EXPECT_LT(ahead, 100);
  gate.open = true;
  test::let_run();
  EXPECT_TRUE(stream.wants_more()) << "done W makes room";
}

// The tensor is on the host, since this device has none.
TEST(P2Stream, KeepsTheTensorsOfWUntilItIsDone) {
  const Device device = test::stand_in_device(14);
  P2Stream stream(device);
  Gate gate;
  const DeviceEvent ready = stream.ready();
  const auto put_in = [&](bool behind_gate) {
    at::Tensor tensor = at::ones({1});
    const c10::weak_intrusive_ptr<c10::TensorImpl> weak(tensor.getIntrusivePtr());
    Saved saved;
    saved.keep_until_p2(std::move(tensor));
    Saved* const all[] = {&saved};
    stream.run({&ready, 1}, all, [&] {
      if (behind_gate) gate.stand_in(device.weights());
    });
    return weak;
  };
  const auto passed = put_in(false);
  device.weights().wait_on_host();
  EXPECT_FALSE(passed.expired());
  EXPECT_TRUE(stream.has_room());
  EXPECT_TRUE(passed.expired()) << "W is done";
  const auto first = put_in(true);
  const auto second = put_in(false);
  EXPECT_TRUE(stream.keeps() && stream.has_room());
  EXPECT_FALSE(first.expired());
  stream.release_oldest();
  EXPECT_TRUE(first.expired());
  EXPECT_FALSE(second.expired());
  std::atomic<bool> done = false;
  test::put(device.compute(), [&] { done = true; });
  test::let_run();
  EXPECT_FALSE(done) << "the freed memory is still read";
  gate.open = true;
  test::let_run();
  EXPECT_TRUE(done.load()) << "W is done";
  stream.join();
  EXPECT_TRUE(second.expired());
  EXPECT_FALSE(stream.keeps());
}

TEST(P2Stream, TheStreamOfWIsCurrentOnlyDuringW) {
  const Device device = test::stand_in_device(13);
  P2Stream stream(device);
  const OnStream here(device.compute());
  const c10::impl::VirtualGuardImpl guard(at::kPrivateUse1);
  const DeviceEvent ready = stream.ready();
  stream.run({&ready, 1}, {}, [&] { EXPECT_EQ(guard.getStream(device.where()), *device.weights()); });
  EXPECT_EQ(guard.getStream(device.where()), *device.compute());
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
