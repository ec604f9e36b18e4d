// Tests streams, events and devices. On the CPU they are empty. On a device they keep the order without waits of the
// host.
#include "twobp/nn/device/device.h"

#include <atomic>

#include <gtest/gtest.h>

#include "tests/nn/device/stand_in_device.h"
#include "twobp/core/check.h"
#include "twobp/nn/device/gpu.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::put;
using test::stand_in_device;

// A stream stops here until open().
class Gate {
 public:
  void stand_in(const DeviceStream& stream) {
    test::hold(stream, [this] { return open_.load(); });
  }
  void open() { open_ = true; }

 private:
  std::atomic<bool> open_{false};
};

TEST(Device, OfACpuIsEmpty) {
  const Device cpu = Device::open("cpu", 3);
  EXPECT_FALSE(cpu.asynchronous());
  EXPECT_EQ(cpu.where(), at::Device(at::kCPU));
  EXPECT_EQ(cpu.compute().native(), nullptr);
  const DeviceEvent event = cpu.compute().record();
  EXPECT_TRUE(event.passed());
  event.wait_on_host();
  cpu.sums().wait(event);
  EXPECT_TRUE(cpu.sums().idle());
  const at::Tensor tensor = at::ones({3});
  cpu.sums().uses(tensor);
  EXPECT_TRUE(on_device(tensor, cpu.where()).is_same(tensor));
  const Values fetched = cpu.fetch({tensor}, event);
  EXPECT_TRUE(fetched.at(0).is_same(tensor));
  const OnStream here(cpu.compute());
}

TEST(Device, SaysWhatIsMissing) {
  const auto message_of = [](const std::function<void()>& call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_NE(message_of([] { Device::open("gpu", 0); }).find("no device is called 'gpu': use cpu or cuda"),
            std::string::npos);
  const std::string beyond = message_of([] { stand_in_device(test::kStandInDevices); });
  EXPECT_NE(beyond.find(concat("device ", test::kStandInDevices, ", but only ", test::kStandInDevices, " are")),
            std::string::npos)
      << beyond;
  if (!at::hasCUDA()) {
    const std::string none = message_of([] { Device::open("cuda", 0); });
    EXPECT_NE(none.find("compute on CPUs: pipeline.device = \"cpu\""), std::string::npos) << none;
  }
  const DeviceSupport support = device_support(at::kPrivateUse1);
  support_devices(at::kPrivateUse1, {support.make_stream, support.facts});
  const std::string parts =
      message_of([] { Device::open_for("privateuseone", test::kStandInDevices + 1, /*in_parts=*/true); });
  support_devices(at::kPrivateUse1, support);
  EXPECT_NE(parts.find("pipeline.gpu_parts: privateuseone:0"), std::string::npos) << parts;
}

// Ranks that share a GPU get its parts, in their order, for computing and for sums.
TEST(Device, RanksThatShareAGpuGetItsParts) {
  static std::vector<std::pair<int, int>> cuts;  // devices and numbers of parts
  static std::vector<int> parts;
  struct Parts : GpuParts {
    explicit Parts(c10::Device device) : device(device) {}
    c10::Stream make_stream(int part) override {
      parts.push_back(part);
      return device_support(device.type()).make_stream(device, true);
    }
    c10::Device device;
  };
  const DeviceSupport support = device_support(at::kPrivateUse1);
  support_devices(at::kPrivateUse1, {support.make_stream, support.facts, [](c10::Device device, int count) {
                                       cuts.emplace_back(device.index(), count);
                                       return std::shared_ptr<GpuParts>(std::make_shared<Parts>(device));
                                     }});
  const auto devices = Device::open_for("privateuseone", 2 * test::kStandInDevices + 1, /*in_parts=*/true);
  support_devices(at::kPrivateUse1, support);
  ASSERT_EQ(cuts.size(), static_cast<size_t>(test::kStandInDevices));
  EXPECT_EQ(cuts[0], std::pair(0, 3));
  EXPECT_EQ(cuts[1], std::pair(1, 2));
  EXPECT_EQ(std::vector<int>(parts.begin(), parts.begin() + 10), (std::vector<int>{0, 0, 1, 1, 2, 2, 0, 0, 1, 1}));
  EXPECT_EQ(devices.back().where().index(), 0);
}

TEST(Device, StreamsWorkInOrderAndEventsTellWhen) {
  const Device device = stand_in_device(0);
  EXPECT_TRUE(device.asynchronous());
  Gate gate;
  std::atomic<int> done = 0;
  gate.stand_in(device.compute());
  put(device.compute(), [&] { done = 1; });
  const DeviceEvent event = device.compute().record();
  EXPECT_FALSE(event.passed()) << "the host ran ahead";
  EXPECT_FALSE(device.compute().idle());
  EXPECT_TRUE(device.sums().idle()) << "the streams are separate";
  gate.open();
  event.wait_on_host();
  EXPECT_TRUE(event.passed());
  EXPECT_EQ(done, 1);
  device.compute().wait_on_host();
}

// Others wait for transfers and sums.
TEST(Device, TransfersComeBeforeComputations) {
  static std::vector<bool> priorities;
  static DeviceSupport support;
  support = device_support(at::kPrivateUse1);
  support_devices(at::kPrivateUse1, {[](c10::Device device, bool high_priority) {
                                       priorities.push_back(high_priority);
                                       return support.make_stream(device, high_priority);
                                     },
                                     support.facts});
  const Device device = stand_in_device(6);
  support_devices(at::kPrivateUse1, support);
  EXPECT_EQ(priorities, (std::vector<bool>{false, true, true, true})) << "computations, sums, copies for either";
}

TEST(Device, AVariableOfCudaWithAnotherValueIsReportedOnce) {
  const auto said = [](const std::string& wanted) {
    ::testing::internal::CaptureStderr();
    set_cuda_variable("TWOBP_TEST_OF_CUDA", wanted, "it is slow");
    return ::testing::internal::GetCapturedStderr();
  };
  ::unsetenv("TWOBP_TEST_OF_CUDA");
  EXPECT_EQ(said("32"), "");
  EXPECT_EQ(std::string(std::getenv("TWOBP_TEST_OF_CUDA")), "32");
  EXPECT_EQ(said("31"), "twobp: TWOBP_TEST_OF_CUDA is 32 instead of 31: it is slow\n");
  EXPECT_EQ(said("31"), "");
  ::unsetenv("TWOBP_TEST_OF_CUDA");
}

// Even a hundred streams share nothing: a transfer that waits for its peer holds up no other work.
TEST(Device, EveryStreamIsItsOwn) {
  const Device device = stand_in_device(5);
  std::vector<DeviceStream> streams = {device.compute(), device.sums()};
  for (int i = 0; i < 100; ++i) streams.push_back(device.make_stream(i % 2 == 0));
  Gate gate;
  for (size_t i = 2; i < streams.size(); ++i) gate.stand_in(streams[i]);
  for (size_t i = 0; i < 2; ++i) {
    const DeviceEvent event = streams[i].record();
    test::let_run();
    EXPECT_TRUE(event.passed()) << i;
  }
  gate.open();
  test::let_run();
}

// Recording again makes another point. An event from before keeps its point.
TEST(Device, EventsAreTheirOwnPoints) {
  const Device device = stand_in_device(0);
  const DeviceEvent first = device.compute().record();
  Gate gate;
  gate.stand_in(device.compute());
  const DeviceEvent second = device.compute().record();
  test::let_run();
  EXPECT_TRUE(first.passed()) << "the event does not wait for later work";
  EXPECT_FALSE(second.passed());
  const DeviceEvent copy = second;
  gate.open();
  copy.wait_on_host();
  EXPECT_TRUE(second.passed()) << "a copy is the same point";
}

// A sum waits for the W that made its gradients. It does not wait for work that was launched in the other stream since.
TEST(Device, OneStreamWaitsForAnotherByEvent) {
  const Device device = stand_in_device(1);
  Gate before, after;
  std::atomic<bool> summed = false;
  before.stand_in(device.compute());
  const DeviceEvent ready = device.compute().record();
  after.stand_in(device.compute());
  device.sums().wait(ready);
  put(device.sums(), [&] { summed = true; });
  test::let_run();
  EXPECT_FALSE(summed);
  before.open();
  test::let_run();
  EXPECT_TRUE(summed) << "the event has passed";
  EXPECT_FALSE(device.compute().idle()) << "the other stream still has work";
  after.open();
  device.compute().wait_on_host();
}

TEST(Device, TheCurrentStreamIsPutBack) {
  const Device device = stand_in_device(2);
  const c10::impl::VirtualGuardImpl guard(at::kPrivateUse1);
  const c10::Stream before = guard.getStream(device.where());
  {
    const OnStream here(device.compute());
    EXPECT_EQ(guard.getStream(device.where()), *device.compute());
    EXPECT_EQ(guard.getDevice(), device.where());
    {
      const OnStream there(device.sums());
      EXPECT_EQ(guard.getStream(device.where()), *device.sums());
    }
    EXPECT_EQ(guard.getStream(device.where()), *device.compute());
  }
  EXPECT_EQ(guard.getStream(device.where()), before);
}

// In-process messages: the work of the receiver waits for the sender's. The receiver's thread does not wait.
TEST(Device, OnlyTheCurrentStreamWaitsForAFetch) {
  const Device sender = stand_in_device(3);
  const Device receiver = stand_in_device(4);
  Gate gate;
  gate.stand_in(sender.compute());
  const DeviceEvent ready = sender.compute().record();
  const OnStream here(receiver.compute());
  const Values values = receiver.fetch({at::ones({2})}, ready);
  std::atomic<bool> used = false;
  put(receiver.compute(), [&] { used = true; });
  test::let_run();
  EXPECT_FALSE(used);
  gate.open();
  test::let_run();
  EXPECT_TRUE(used) << "the sender's work is done";
}

// A sum waits for another replica, which may be late.
TEST(Device, ASumThatIsWithheldHoldsNoFetchUp) {
  const Device sender = stand_in_device(3);
  const Device receiver = stand_in_device(4);
  const auto tensor_of = [&](int number) {
    const OnStream there(sender.compute());
    return at::full({2}, number, at::TensorOptions(at::kFloat).device(sender.where()));
  };
  const at::Tensor part = tensor_of(1), activation = tensor_of(2);
  const DeviceEvent made = sender.compute().record();
  made.wait_on_host();
  Gate gate;
  gate.stand_in(sender.sums());
  const DeviceEvent late = sender.sums().record();
  Values summed, received;
  {
    const OnStream here(receiver.sums());
    summed = receiver.fetch({part}, late);
  }
  const OnStream here(receiver.compute());
  received = receiver.fetch({activation}, made);
  std::atomic<bool> used = false;
  put(receiver.compute(), [&] { used = true; });
  test::let_run();
  EXPECT_TRUE(used) << "the activation is there";
  EXPECT_FALSE(receiver.sums().idle());
  gate.open();
  receiver.sums().wait_on_host();
  EXPECT_EQ(received.at(0).cpu()[0].item<float>(), 2);
  EXPECT_EQ(summed.at(0).cpu()[0].item<float>(), 1);
}

TEST(Device, CopiesBetweenGpus) {
  const auto* cuda = c10::impl::device_guard_impl_registry[static_cast<size_t>(at::kCUDA)].load();
  if (!cuda || cuda->deviceCount() < 2) GTEST_SKIP() << "needs two GPUs";
  const Device first = Device::open("cuda", 0);
  const Device second = Device::open("cuda", 1);
  for (int round = 0; round < 20; ++round) {
    at::Tensor sent;
    DeviceEvent ready;
    {
      const OnStream here(first.compute());
      sent = at::full({1 << 20}, round, at::TensorOptions(at::kFloat).device(first.where()));
      for (int i = 0; i < 50; ++i) sent = sent + 1;
      ready = first.compute().record();
    }
    const OnStream there(second.compute());
    const Values values = second.fetch({sent}, ready);
    sent.reset();
    EXPECT_EQ(values.at(0).device(), second.where());
    EXPECT_EQ(values.at(0).sum().item<double>(), (1 << 20) * (round + 50.0));
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
