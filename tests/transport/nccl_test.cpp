// Tests the NCCL transport beyond the conformance suite: order, errors and frozen peers on the stand-in for NCCL, and
// on GPUs if there are any.
#include "twobp/transport/nccl/nccl.h"

#include <barrier>
#include <numeric>
#include <thread>

#include <gtest/gtest.h>

#include "tests/nn/device/stand_in_device.h"
#include "tests/transport/counted.h"
#include "tests/transport/device_transports.h"
#include "tests/transport/stand_in_nccl.h"
#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/transport/collectives.h"
#include "twobp/transport/nccl/nccl_communicator.h"
#include "twobp/transport/nccl/nccl_link.h"
#include "twobp/transport/threads/in_process.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::stand_in_device;
using test::stand_in_nccl;
using test::stand_in_nccl_state;

constexpr double kLong = 60;  // seconds

Tag forward(int stage, int micro_batch) {
  return {7, stage, micro_batch, MessageKind::kForward};
}

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

void expect_parts(const std::string& what, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(what.find(part), std::string::npos) << "no \"" << part << "\" in: " << what;
  }
}

class Nccl : public ::testing::Test {
 protected:
  void SetUp() override {
    stand_in_nccl_state().error = 0;
    stand_in_nccl_state().loses_data = false;
    stand_in_nccl_state().stuck = false;
    stand_in_nccl_state().most_in_stream = 0;
    stand_in_nccl_state().bytes = 0;
    stand_in_nccl_state().group_calls = 0;
    stand_in_nccl_state().ends = 0;
    stand_in_nccl_state().most_waiting = 0;
    stand_in_nccl_state().unmatched = 0;
    stand_in_nccl_state().waiting_ends = 0;
    stand_in_nccl_state().version = 22705;
    stand_in_nccl_state().most_ctas = 0;
    stand_in_nccl_state().polls_under_way = 0;
    stand_in_nccl_state().polls_in_a_row = 0;
  }
  void TearDown() override { SetUp(); }

  // Runs two ranks that have `links`.
  static void run(const NcclLinks& links, NcclOptions options, const test::RankBody& body) {
    run_over(make_in_process_transports(2, 0), links, options, body);
  }
  static void run_over(std::vector<std::unique_ptr<Transport>> hosts, const NcclLinks& links, NcclOptions options,
                       const test::RankBody& body) {
    options.tensors = at::kCPU;
    test::run_on_threads(2, [&](int rank) {
      const Device device = stand_in_device(rank);
      const auto end = test::by_way_of(device, make_nccl_transport(std::shared_ptr<Transport>(std::move(hosts[rank])),
                                                                   stand_in_nccl(), device, links, options));
      body(*end);
    });
  }

  // What `refused` must say on the rank that finds it, and how every rank ends: with an error or an abort.
  static void expect_end(Transport& transport, const std::vector<std::string>& parts,
                         const std::function<void()>& refused) {
    const std::string what = message_of(refused);
    transport.abort(what);
    expect_parts(what, parts);
  }
};

TEST_F(Nccl, SendsTensorsByNcclAndHeadsThroughTheHost) {
  run(test::all_links(2), {}, [](Transport& transport) {
    const at::Tensor numbers = at::arange(1000, at::kDouble);
    if (transport.rank() == 0) {
      transport.isend(1, forward(1, 0), {numbers, at::Tensor(), at::empty({0, 4})});
      transport.flush(kLong);
      return;
    }
    const Values values = transport.receive(0, forward(1, 0), kLong);
    EXPECT_TRUE(at::equal(values.at(0), numbers));
    EXPECT_FALSE(values.at(1).defined());
    EXPECT_EQ(values.at(2).sizes(), (at::IntArrayRef{0, 4}));
  });
  EXPECT_EQ(stand_in_nccl_state().bytes, 8000 + 2) << "and a first byte of each link";
}

// Only a few transfers wait in the stream, whatever number is sent before the other side looks.
TEST_F(Nccl, FewTransfersWaitInAStream) {
  run(test::all_links(2), {}, [](Transport& transport) {
    constexpr int kMessages = 300;
    if (transport.rank() == 0) {
      for (int i = 0; i < kMessages; ++i) transport.isend(1, forward(1, i), {at::full({100}, i)});
      transport.receive(1, forward(0, 0), kLong);
      transport.flush(kLong);
      return;
    }
    const double until = now_seconds() + kLong;
    while (stand_in_nccl_state().most_in_stream < 8 && now_seconds() < until) std::this_thread::yield();
    for (int i = kMessages - 1; i >= 0; --i) {
      EXPECT_EQ(transport.receive(0, forward(1, i), kLong).at(0)[99].item<float>(), static_cast<float>(i));
    }
    transport.isend(0, forward(0, 0), {});
    transport.flush(kLong);
  });
  EXPECT_EQ(stand_in_nccl_state().most_in_stream, 8);
}

TEST_F(Nccl, SendsThroughTheHostWithoutALink) {
  run({{0, 1}}, {}, [](Transport& transport) {
    if (transport.rank() == 1) {
      transport.isend(0, forward(0, 0), {at::full({2}, 4.0f)});
      EXPECT_EQ(transport.receive(0, forward(1, 0), kLong).at(0)[0].item<float>(), 5);
    } else {
      transport.isend(1, forward(1, 0), {at::full({2}, 5.0f)});
      EXPECT_EQ(transport.receive(1, forward(0, 0), kLong).at(0)[1].item<float>(), 4);
      transport.flush(kLong);
    }
  });
  EXPECT_EQ(stand_in_nccl_state().bytes, 8 + 1);
}

// Runs two ranks that look for messages, with tensors on their devices.
template <typename Body>
void run_on_devices(const Body& body) {
  auto hosts = make_in_process_transports(2, 0);
  NcclOptions options;
  options.tensors = at::kPrivateUse1;
  std::atomic<int> left = 0;
  test::run_on_threads(2, [&](int rank) {
    const Device device = stand_in_device(rank);
    const OnStream here(device.compute());
    const auto end = make_nccl_transport(std::shared_ptr<Transport>(std::move(hosts[rank])), stand_in_nccl(), device,
                                         {{0, 1}}, options);
    body(*end, device);
    for (++left; left < 2;) end->progress();
  });
}

Forms forms_of_floats(int64_t count) {
  return {{at::kFloat, {count}, {1}}};
}

// Nothing goes through the host, and no transfer is left without its other side.
TEST_F(Nccl, ExpectedMessagesHaveNoHeads) {
  constexpr int kMessages = 20;
  std::vector<std::unique_ptr<Transport>> hosts;
  std::vector<test::Counted*> counted;
  for (auto& host : make_in_process_transports(2, 0)) {
    counted.push_back(new test::Counted(std::move(host)));
    hosts.emplace_back(counted.back());
  }
  run_over(std::move(hosts), test::all_links(2), {}, [&](Transport& transport) {
    const int rank = transport.rank();
    barrier(transport, kLong);
    counted[rank]->sent();
    for (int i = 0; i < kMessages; ++i) {
      EXPECT_TRUE(transport.expect(1 - rank, forward(rank, i), forms_of_floats(3)));
      transport.isend_expected(1 - rank, forward(1 - rank, i), {at::full({3}, static_cast<float>(i + rank))});
    }
    for (int i = 0; i < kMessages; ++i) {
      EXPECT_EQ(transport.receive(1 - rank, forward(rank, i), kLong).at(0)[2].item<float>(),
                static_cast<float>(i + 1 - rank));
    }
    EXPECT_EQ(test::sum_of(counted[rank]->sent()), 0);
    barrier(transport, kLong);
    transport.flush(kLong);
  });
  EXPECT_EQ(stand_in_nccl_state().unmatched, 0);
}

// A kernel that waits for what its rank has still to cause would block cudaFree. So a receive is launched when the rank
// asks for its message, and the rank gets few messages that have not arrived.
TEST_F(Nccl, AReceiveIsLaunchedWhenItsMessageIsAskedFor) {
  std::atomic<bool> asked = false;
  run_on_devices([&](Transport& transport, const Device& device) {
    constexpr int kMessages = 5;
    if (transport.rank() == 0) {
      while (!asked) transport.progress();
      for (int i = 0; i < kMessages; ++i)
        transport.isend_expected(1, forward(1, i),
                                 {at::full({3}, i, at::TensorOptions(at::kFloat).device(device.where()))});
      transport.flush(kLong);
      return;
    }
    stand_in_nccl_state().most_waiting = 0;
    for (int i = 0; i < kMessages; ++i) EXPECT_TRUE(transport.expect(0, forward(1, i), forms_of_floats(3)));
    transport.progress();
    EXPECT_EQ(stand_in_nccl_state().most_waiting, 0);
    Values first, second, third;
    EXPECT_TRUE(transport.try_receive(0, forward(1, 0), first)) << "the stream waits, not the host";
    EXPECT_TRUE(transport.try_receive(0, forward(1, 1), second));
    EXPECT_FALSE(transport.try_receive(0, forward(1, 2), third));
    EXPECT_EQ(stand_in_nccl_state().most_waiting, 3);
    asked = true;
    EXPECT_TRUE(first.at(0).cpu().eq(0).all().item<bool>());
    EXPECT_TRUE(second.at(0).cpu().eq(1).all().item<bool>());
    for (int i = 2; i < kMessages; ++i)
      EXPECT_TRUE(transport.receive(0, forward(1, i), kLong).at(0).cpu().eq(i).all().item<bool>());
  });
}

// An expected message does not wait for the host once more.
TEST_F(Nccl, AnExpectedMessageIsLaunchedBeforeItsTensorsAreReady) {
  std::atomic<bool> open = false;
  run_on_devices([&](Transport& transport, const Device& device) {
    if (transport.rank() == 1) {
      EXPECT_TRUE(transport.expect(0, forward(1, 0), forms_of_floats(3)));
      EXPECT_TRUE(transport.receive(0, forward(1, 0), kLong).at(0).cpu().eq(7).all().item<bool>());
      return;
    }
    stand_in_nccl_state().most_in_stream = 0;
    test::hold(device.compute(), [&] { return open.load(); });
    transport.isend_expected(1, forward(1, 0), {at::full({3}, 7.0f, at::TensorOptions().device(device.where()))});
    EXPECT_EQ(stand_in_nccl_state().most_in_stream, 1);
    open = true;
    transport.flush(kLong);
  });
}

TEST_F(Nccl, AHeadForALaunchedReceiveIsRefused) {
  std::atomic<bool> launched = false;
  EXPECT_ANY_THROW(run_on_devices([&](Transport& transport, const Device& device) {
    if (transport.rank() == 1) {
      stand_in_nccl_state().loses_data = true;
      EXPECT_TRUE(transport.expect(0, forward(1, 3), forms_of_floats(3)));
      Values values;
      EXPECT_TRUE(transport.try_receive(0, forward(1, 3), values));
      launched = true;
      expect_end(transport,
                 {"rank 0 sent a description of the input of stage 1, micro-batch 4", "rank 1 expects", "micro-batch 3",
                  "the same plan"},
                 [&] { transport.receive(0, forward(9, 9), kLong); });
      return;
    }
    while (!launched) transport.progress();
    transport.isend(1, forward(1, 4), {at::ones({3}, at::TensorOptions().device(device.where()))});
    EXPECT_THROW(transport.receive(1, forward(9, 9), kLong), Aborted);
  }));
}

// The device waits for them, and the watch ends that.
TEST_F(Nccl, AnExpectedMessageThatDoesNotComeEndsTheRun) {
  NcclOptions options;
  options.timeout = 0.3;
  run(test::all_links(2), options, [](Transport& transport) {
    const std::string what = message_of([&] {
      if (transport.rank() == 1) {
        transport.expect(0, forward(1, 3), forms_of_floats(3));
        transport.receive(0, forward(1, 3), kLong);
      }
      transport.receive(1 - transport.rank(), forward(9, 9), kLong);
    });
    expect_parts(what,
                 {"NCCL from rank 0 to rank 1", "the input of stage 1, micro-batch 3", "has not arrived in 0.3 s"});
  });
}

// A rank that was told of a message with a description between expected ones gets them in this order alone.
TEST_F(Nccl, ADescriptionInAnotherPlaceIsRefused) {
  run(test::all_links(2), {}, [&](Transport& transport) {
    if (transport.rank() == 1) {
      transport.expect(0, forward(1, 0), forms_of_floats(3));
      transport.expect(0, forward(1, 1), {});
      expect_end(transport, {"rank 0 sent a description of the input of stage 1, micro-batch 1", "or later"},
                 [&] { transport.receive(0, forward(9, 9), kLong); });
      return;
    }
    transport.isend(1, forward(1, 1), {at::ones({3})});
    transport.isend_expected(1, forward(1, 0), {at::ones({3})});
    EXPECT_THROW(transport.receive(1, forward(9, 9), kLong), Aborted);
  });
}

// The receiver's kernel must not occupy multiprocessors while the sender still computes.
TEST_F(Nccl, ATransferBeginsWhenItsTensorsAreReady) {
  std::atomic<bool> open = false;
  std::atomic<bool> asked = false;
  run_on_devices([&](Transport& transport, const Device& device) {
    stand_in_nccl_state().most_in_stream = 0;
    if (transport.rank() == 0) {
      test::hold(device.compute(), [&] { return open.load(); });
      transport.isend(1, forward(1, 0), {at::full({3}, 7.0f, at::TensorOptions().device(device.where()))});
      while (!asked) transport.progress();
      test::let_run();
      EXPECT_EQ(stand_in_nccl_state().most_in_stream, 0);
      open = true;
      transport.flush(kLong);
      return;
    }
    Values values;
    for (int i = 0; i < 100; ++i) EXPECT_FALSE(transport.try_receive(0, forward(1, 0), values));
    asked = true;
    EXPECT_TRUE(transport.receive(0, forward(1, 0), kLong).at(0).cpu().eq(7).all().item<bool>());
  });
}

// A sent tensor is freed as soon as it has left, not when the link sends again.
TEST_F(Nccl, KeepsASentTensorUntilItHasLeft) {
  std::atomic<bool> received = false;
  run_on_devices([&](Transport& transport, const Device& device) {
    if (transport.rank() == 1) {
      transport.receive(0, forward(1, 0), kLong);
      device.current().wait_on_host();
      received = true;
      return;
    }
    at::Tensor tensor = at::ones({3}, at::TensorOptions().device(device.where()));
    const c10::weak_intrusive_ptr<c10::TensorImpl> weak(tensor.getIntrusivePtr());
    transport.isend(1, forward(1, 0), {std::move(tensor)});
    EXPECT_FALSE(weak.expired());
    while (!received) transport.progress();
    const double until = now_seconds() + kLong;
    while (!weak.expired() && now_seconds() < until) transport.progress();
    EXPECT_TRUE(weak.expired());
  });
}

// Kernels of links leave the multiprocessors to F, I and W. A library before 2.17 has no such setting.
TEST_F(Nccl, OccupiesFewMultiprocessors) {
  for (const auto& [version, most] :
       {std::pair{22705, kNcclLinkCtas}, std::pair{21700, kNcclLinkCtas}, std::pair{21602, 32}}) {
    stand_in_nccl_state().version = version;
    stand_in_nccl_state().most_ctas = 0;
    run(test::all_links(2), {}, [](Transport& transport) { barrier(transport, kLong); });
    EXPECT_EQ(stand_in_nccl_state().most_ctas, most) << "version " << version;
  }
}

// A call that is done soon costs no pause.
TEST_F(Nccl, PollsWithoutAPauseAtFirst) {
  run(test::all_links(2), {}, [](Transport& transport) {
    constexpr int kMessages = 20;
    if (transport.rank() == 0) {
      stand_in_nccl_state().polls_under_way = 5;
      for (int i = 0; i < kMessages; ++i) transport.isend(1, forward(1, i), {at::full({3}, i)});
      transport.flush(kLong);
      return;
    }
    for (int i = 0; i < kMessages; ++i)
      EXPECT_EQ(transport.receive(0, forward(1, i), kLong).at(0)[2].item<int64_t>(), i);
  });
  EXPECT_GT(stand_in_nccl_state().polls_in_a_row, 0);
}

// Whether work that is launched in the stream of sums now runs before `open` lets the stream of F, I and W go on.
bool runs_early(const Device& device, std::atomic<bool>& open) {
  std::atomic<bool> ran = false;
  test::put(device.sums(), [&] { ran = true; });
  test::let_run();
  const bool early = ran;
  open = true;
  device.compute().wait_on_host();
  device.sums().wait_on_host();
  return early;
}

// What a rank sends to itself is used after the work that makes it, in whatever stream.
TEST_F(Nccl, AMessageToItselfWaitsForItsTensors) {
  run_on_devices([&](Transport& transport, const Device& device) {
    const int rank = transport.rank();
    std::atomic<bool> open = false;
    test::hold(device.compute(), [&] { return open.load(); });
    transport.isend(rank, forward(1, 0), {at::ones({3}, at::TensorOptions().device(device.where()))});
    const OnStream there(device.sums());
    const Values values = transport.receive(rank, forward(1, 0), kLong);
    EXPECT_FALSE(runs_early(device, open));
  });
}

// The same for a tensor that goes by the host: another stream may have copied it to the device.
TEST_F(Nccl, ATensorByTheHostIsUsedWhenItIsOnTheDevice) {
  std::atomic<bool> sent = false;
  run_on_devices([&](Transport& transport, const Device& device) {
    if (transport.rank() == 1) {  // it has no link to rank 0
      transport.isend(0, forward(0, 0), {at::ones({3}, at::TensorOptions().device(device.where()))});
      sent = true;
      return;
    }
    std::atomic<bool> open = false;
    test::hold(device.compute(), [&] { return open.load(); });
    while (!sent) transport.progress();
    transport.progress();  // takes the message, in the stream of F, I and W
    const OnStream there(device.sums());
    const Values values = transport.receive(1, forward(0, 0), kLong);
    EXPECT_FALSE(runs_early(device, open));
    EXPECT_TRUE(values.at(0).cpu().eq(1).all().item<bool>());
  });
}

// Ranks destroy their links in different orders, and must not wait for each other there.
TEST_F(Nccl, BothEndsAreFinalizedBeforeOneIsDestroyed) {
  run(test::all_links(2), {}, [](Transport& transport) { barrier(transport, kLong); });
  EXPECT_EQ(stand_in_nccl_state().waiting_ends, 0);
}

// Counts errors that are this rank's own to report. A process whose threads are all aborted leaves the report to
// another.
void reporting(std::atomic<int>& reports, const std::function<void()>& call) {
  try {
    call();
  } catch (const Aborted&) {
    throw;
  } catch (const std::exception&) {
    ++reports;
    throw;
  }
}

TEST_F(Nccl, ATransferThatDoesNotEndEndsTheRun) {
  const double begin = now_seconds();
  NcclOptions options;
  options.timeout = 0.3;
  std::atomic<int> reports = 0;
  run(test::all_links(2), options, [&](Transport& transport) {
    stand_in_nccl_state().loses_data = true;
    if (transport.rank() == 0) transport.isend(1, forward(1, 3), {at::ones({2})});
    // The receiver gets tensors at once. Only the abort ends a wait for their data.
    const std::string what = message_of([&] {
      reporting(reports, [&] {
        if (transport.rank() == 1) transport.receive(0, forward(1, 3), kLong);
        transport.receive(1 - transport.rank(), forward(9, 9), kLong);
      });
    });
    expect_parts(what,
                 {"NCCL from rank 0 to rank 1", "the input of stage 1, micro-batch 3", "has not arrived in 0.3 s"});
  });
  EXPECT_GE(reports, 1);
  EXPECT_LT(now_seconds() - begin, 10);
}

// The watch needs no lock of a launch, or a rank that hangs in one would end no run.
TEST_F(Nccl, ATransferIsWatchedWhileALaunchDoesNotReturn) {
  NcclOptions options;
  options.timeout = 0.3;
  std::barrier both(2);
  run(test::all_links(2), options, [&](Transport& transport) {
    both.arrive_and_wait();
    if (transport.rank() == 0) {
      // Expected messages are launched in the call, whether their tensors are ready or not.
      transport.isend_expected(1, forward(1, 3), {at::ones({2})});
      stand_in_nccl_state().stuck = true;
      const std::string what = message_of([&] { transport.isend_expected(1, forward(1, 4), {at::ones({2})}); });
      expect_parts(what, {"the input of stage 1, micro-batch 3", "has not arrived in 0.3 s"});
    }
    both.arrive_and_wait();  // rank 1 receives nothing, and launches nothing
  });
}

// The watch allocates nothing: the receive of a message that was announced is left to its rank.
TEST_F(Nccl, TheWatchLaunchesNoReceive) {
  std::atomic<bool> looked = false;
  run(test::all_links(2), {}, [&](Transport& transport) {
    if (transport.rank() == 0) {
      stand_in_nccl_state().most_waiting = 0;
      transport.isend(1, forward(1, 0), {at::ones({2})});
      while (!looked) transport.progress();
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(350));  // the watch looks every 100 ms
    EXPECT_EQ(stand_in_nccl_state().most_waiting, 0);
    transport.receive(0, forward(1, 0), kLong);
    EXPECT_EQ(stand_in_nccl_state().most_waiting, 1);
    looked = true;
  });
}

TEST_F(Nccl, AnErrorOfNcclEndsTheRun) {
  std::atomic<int> reports = 0;
  run(test::all_links(2), {}, [&](Transport& transport) {
    const std::string what = message_of([&] {
      barrier(transport, kLong);
      if (transport.rank() == 0) stand_in_nccl_state().error = 6;
      reporting(reports, [&] { transport.receive(1 - transport.rank(), forward(9, 9), kLong); });
    });
    expect_parts(what, {"remote process exited", "NCCL_DEBUG=INFO"});
  });
  EXPECT_GE(reports, 1);
}

// A rank may wait in a call to NCCL. It leaves the call before its communicator is freed.
TEST_F(Nccl, AnAbortEndsARunningCall) {
  std::barrier connected(2);
  run(test::all_links(2), {}, [&](Transport& transport) {
    connected.arrive_and_wait();
    if (transport.rank() == 1) {
      expect_parts(message_of([&] { transport.receive(0, forward(9, 9), kLong); }), {"enough"});
      return;
    }
    stand_in_nccl_state().stuck = true;
    std::thread other([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      transport.abort("enough");
    });
    EXPECT_THROW(
        {
          try {
            transport.isend(1, forward(1, 0), {at::ones({2})});
            transport.flush(kLong);
          } catch (const Aborted& aborted) {
            expect_parts(aborted.what(), {"rank 0 stopped: enough"});
            throw;
          }
        },
        Aborted);
    other.join();
  });
}

TEST_F(Nccl, AMissingPeerAtTheStartIsNamed) {
  auto hosts = make_in_process_transports(2, 0);
  NcclOptions options;
  options.tensors = at::kCPU;
  options.connection_timeout = 0.3;
  const std::string what = message_of([&] {
    make_nccl_transport(std::shared_ptr<Transport>(std::move(hosts[0])), stand_in_nccl(), stand_in_device(0), {{0, 1}},
                        options);
  });
  expect_parts(what, {"NCCL from rank 0 to rank 1", "is not done in time"});
}

TEST_F(Nccl, NeedsGpus) {
  auto hosts = make_in_process_transports(1, 0);
  expect_parts(message_of([&] {
                 make_nccl_transport(std::shared_ptr<Transport>(std::move(hosts[0])), stand_in_nccl(), Device(), {});
               }),
               {"nccl needs GPUs", "on CPUs start with mpirun"});
}

TEST_F(Nccl, RefusesOtherLibraries) {
  expect_parts(message_of([] { load_nccl("/nowhere/libnccl.so.2"); }),
               {"NCCL is not available", "/nowhere/libnccl.so.2", "LD_LIBRARY_PATH"});
  expect_parts(message_of([] { load_nccl("libm.so.6"); }), {"libm.so.6 is no NCCL", "ncclGetVersion"});
}

// The world has the roles of a run of 2 x 2: messages along a pipeline, sums between replicas, and texts between
// processes.
TEST_F(Nccl, MakesAWorld) {
  auto hosts = make_in_process_transports(4, 0);
  NcclOptions options;
  options.tensors = at::kCPU;
  test::run_on_threads(4, [&](int process) {
    const Device device = stand_in_device(process);
    const OnStream here(device.compute());
    World world = make_nccl_world(Ends(1, [&](int) { return std::move(hosts[process]); }), stand_in_nccl(), {device}, 2,
                                  2, {0, 1}, options);
    EXPECT_EQ(world.replica, process / 2);
    EXPECT_EQ(world.process(), process);
    const int rank = process % 2;
    EXPECT_TRUE(world.is_local(rank));
    EXPECT_FALSE(world.is_local(1 - rank));
    Transport& pipeline = *world.pipeline[rank];
    pipeline.isend(1 - rank, forward(rank, 0), {at::full({3}, process)});
    const Values values = pipeline.receive(1 - rank, forward(1 - rank, 0), kLong);
    device.compute().wait_on_host();
    EXPECT_EQ(values.at(0)[2].item<int64_t>(), 2 * world.replica + 1 - rank);
    world.data[rank]->isend(1 - world.replica, forward(0, 0), {at::full({3}, process)});
    const Values other = world.data[rank]->receive(1 - world.replica, forward(0, 0), kLong);
    device.compute().wait_on_host();
    EXPECT_EQ(other.at(0)[0].item<int64_t>(), 2 * (1 - world.replica) + rank);
    if (process == 3) {
      barrier(*world.processes, kLong);
      world.abort("the test says so");
    } else {
      const std::string what = message_of([&] {
        barrier(*world.processes, kLong);
        world.processes->receive(3, forward(0, 1), kLong);
      });
      expect_parts(what, {"the test says so"});
    }
  });
  auto three = make_in_process_transports(3, 0);
  expect_parts(message_of([&] {
                 make_nccl_world(Ends(1, [&](int) { return std::move(three[0]); }), stand_in_nccl(),
                                 {stand_in_device(0)}, 2, 2, {0, 1});
               }),
               {"2 x 2 = 4 ranks", "3 processes were started"});
}

// However long the pipeline is: a rank has two links with the rank before, and two with the rank after. However many
// replicas there are: it has one communicator with them.
TEST_F(Nccl, ConnectsNeighboursAlone) {
  for (const auto& [replicas, ranks] : {std::pair(1, 8), std::pair(4, 32), std::pair(8, 64)}) {
    stand_in_nccl_state().ends = 0;
    const int all = replicas * ranks;
    std::vector<int> rank_of_stage(ranks);
    std::iota(rank_of_stage.begin(), rank_of_stage.end(), 0);
    NcclOptions options;
    options.group_sums = true;
    options.tensors = at::kCPU;
    auto hosts = make_in_process_transports(all, 0);
    test::run_on_threads(all, [&](int rank) {
      const World world =
          make_nccl_world(Ends(1, [&](int) { return std::move(hosts[rank]); }), stand_in_nccl(),
                          {stand_in_device(rank % test::kStandInDevices)}, replicas, ranks, rank_of_stage, options);
    });
    EXPECT_EQ(stand_in_nccl_state().ends, all * (4 + (replicas > 1 ? 1 : 0)));
  }
}

// Runs ranks that sum together, on their devices.
template <typename Body>
void run_group(int ranks, NcclOptions options, const Body& body) {
  auto hosts = make_in_process_transports(ranks, 0);
  options.tensors = at::kPrivateUse1;
  std::vector<int> all(ranks);
  std::iota(all.begin(), all.end(), 0);
  test::run_on_threads(ranks, [&](int rank) {
    const Device device = stand_in_device(rank);
    const OnStream here(device.compute());
    const auto end = make_nccl_transport(std::shared_ptr<Transport>(std::move(hosts[rank])), stand_in_nccl(), device,
                                         {}, options, all);
    body(*end, device, at::TensorOptions(at::kFloat).device(device.where()));
    barrier(*end, kLong);
  });
}

// One communicator, and no messages. The sums wait for the stream in which their tensors are made.
TEST_F(Nccl, SumsInAGroup) {
  constexpr int kRanks = 3;
  run_group(kRanks, {}, [](Transport& transport, const Device& device, const at::TensorOptions& place) {
    const int rank = transport.rank();
    std::atomic<bool> open = false;
    test::hold(device.compute(), [&] { return open.load(); });
    at::Tensor sum = at::full({1000}, rank, place).add_(1);
    AllReduce reduced(transport, sum, 1);
    const at::Tensor mine = at::full({5}, rank, place), last = at::full({7}, rank + 3, place);
    ReduceScatter scattered(transport, {mine, last}, {0, kRanks - 1}, 2);
    EXPECT_FALSE(reduced.ready());
    open = true;
    wait_for(reduced, kLong);
    wait_for(scattered, kLong);
    EXPECT_TRUE(sum.cpu().eq(1 + 2 + 3).all().item<bool>());
    EXPECT_TRUE(mine.cpu().eq(rank == 0 ? 0 + 1 + 2 : rank).all().item<bool>());
    EXPECT_TRUE(last.cpu().eq(rank == kRanks - 1 ? 3 + 4 + 5 : rank + 3).all().item<bool>());
    GroupSums* const sums = group_sums_for(transport, sum);
    ASSERT_NE(sums, nullptr);
    sums->wait(sums->broadcast({sum.fill_(rank)}, {1}), kLong);
    EXPECT_TRUE(sum.cpu().eq(1).all().item<bool>());
  });
  EXPECT_EQ(stand_in_nccl_state().ends, kRanks);
  EXPECT_EQ(stand_in_nccl_state().group_calls, kRanks * (3 + 1 + 2 + 1)) << "and first ones";
  EXPECT_EQ(stand_in_nccl_state().most_ctas, kNcclGroupCtas);
  EXPECT_EQ(stand_in_nccl_state().waiting_ends, 0);
}

// What NCCL cannot add goes by messages. So does what lies on the host, such as the parts of a norm.
TEST_F(Nccl, SumsTensorsOfTheHostByMessages) {
  run_group(2, {}, [](Transport& transport, const Device&, const at::TensorOptions&) {
    at::Tensor sum = at::full({3}, transport.rank() + 1, at::kDouble);
    all_reduce_sum(transport, sum, kLong);
    EXPECT_TRUE(sum.eq(3).all().item<bool>());
  });
  EXPECT_EQ(stand_in_nccl_state().group_calls, 2 * 3) << "the first ones";
}

// A kernel of NCCL waits for ever for a rank that is stuck.
TEST_F(Nccl, ASumThatDoesNotEndEndsTheRun) {
  NcclOptions options;
  options.timeout = 0.3;
  std::atomic<int> reports = 0;
  EXPECT_ANY_THROW(run_group(3, options, [&](Transport& transport, const Device&, const at::TensorOptions& place) {
    const std::string what = message_of([&] {
      reporting(reports, [&] {
        if (transport.rank() == 2) transport.receive(0, forward(9, 9), kLong);  // it does not sum
        at::Tensor sum = at::ones({4}, place);
        all_reduce_sum(transport, sum, kLong);
      });
    });
    expect_parts(what, {"NCCL among ranks 0, 1, 2", "a sum", "has not arrived in 0.3 s"});
  }));
  EXPECT_GE(reports, 1);
}

// The rank itself gives up, too, if its time-out is shorter.
TEST_F(Nccl, ASumIsWaitedForInVain) {
  EXPECT_ANY_THROW(run_group(2, {}, [&](Transport& transport, const Device&, const at::TensorOptions& place) {
    if (transport.rank() == 1) {
      transport.receive(0, forward(9, 9), kLong);
      return;
    }
    at::Tensor sum = at::ones({4}, place);
    const std::string what = message_of([&] { all_reduce_sum(transport, sum, 0.1); });
    expect_parts(what, {"rank 0 waited 0.1 s", "ranks 0, 1"});
    transport.abort(what);
  }));
}

// With sums of its own, a rank needs one communicator for any number of replicas, and else two for each.
TEST_F(Nccl, ConnectsAnyNumberOfReplicasByOneCommunicator) {
  constexpr int kReplicas = 6;
  for (const bool grouped : {false, true}) {
    stand_in_nccl_state().ends = 0;
    auto hosts = make_in_process_transports(kReplicas, 0);
    NcclOptions options;
    options.group_sums = grouped;
    options.tensors = at::kCPU;
    test::run_on_threads(kReplicas, [&](int rank) {
      const World world = make_nccl_world(Ends(1, [&](int) { return std::move(hosts[rank]); }), stand_in_nccl(),
                                          {stand_in_device(rank)}, kReplicas, 1, {0}, options);
    });
    EXPECT_EQ(stand_in_nccl_state().ends, kReplicas * (grouped ? 1 : 2 * (kReplicas - 1)));
  }
}

TEST(NcclHead, CarriesShapesAndTypes) {
  const at::Tensor transposed = at::arange(6, at::kInt).view({2, 3}).t();
  const at::Tensor strided = at::arange(10, at::kFloat).slice(0, 0, 10, 2);
  PackedHead packed = pack_head({-5, 3, 2, MessageKind::kBackward, 2}, {transposed, strided, at::Tensor()}, at::kCPU);
  ASSERT_EQ(packed.on_device.size(), 2U);
  EXPECT_TRUE(packed.on_device[0].is_same(transposed)) << "dense, as it is";
  EXPECT_TRUE(packed.on_device[1].is_contiguous());
  ReceivedHead head = unpack_head(packed.head, 1);
  EXPECT_EQ(head.tag, (Tag{-5, 3, 2, MessageKind::kBackward, 2}));
  const Values made = head.allocate(at::kCPU, at::kCPU);
  ASSERT_EQ(made.size(), 2U);
  EXPECT_EQ(made[0].strides(), transposed.strides());
  EXPECT_EQ(made[0].scalar_type(), at::kInt);
  EXPECT_EQ(made[1].sizes(), (at::IntArrayRef{5}));
  EXPECT_FALSE(head.values.at(2).defined());
  PackedHead along = pack_head({}, {transposed}, at::kCUDA);
  EXPECT_TRUE(along.on_device.empty());
  EXPECT_TRUE(at::equal(unpack_head(along.head, 1).values.at(0), transposed));
}

// Every number of a head is replaced by others. The result is an error that names the sender, or a valid head.
TEST(NcclHead, AnInvalidHeadIsRefused) {
  const PackedHead packed = pack_head({}, {at::ones({4, 3}), at::ones({2})}, at::kCPU);
  int refused = 0;
  for (int64_t place = 0; place < packed.head[0].numel(); ++place) {
    for (const int64_t number : {int64_t{-3}, int64_t{2}, int64_t{1000}, int64_t{1} << 40, INT64_MAX, INT64_MIN}) {
      const at::Tensor numbers = packed.head[0].clone();
      numbers.mutable_data_ptr<int64_t>()[place] = number;
      try {
        for (const auto& shape : unpack_head({numbers}, 4).shapes) EXPECT_LE(shape.sizes.size(), 2U);
      } catch (const Error& error) {
        ++refused;
        EXPECT_NE(std::string(error.what()).find("rank 4"), std::string::npos) << error.what();
      }
    }
    EXPECT_THROW(unpack_head({packed.head[0].narrow(0, 0, place)}, 4), Error) << "cut after " << place;
  }
  EXPECT_GT(refused, 50);
  EXPECT_THROW(unpack_head({}, 4), Error);
  EXPECT_THROW(unpack_head({packed.head[0].to(at::kInt)}, 4), Error);
  EXPECT_THROW(unpack_head({packed.head[0], at::ones({1})}, 4), Error) << "one tensor too many";
}

// On real GPUs, by NCCL's own sums.
TEST(NcclOnGpus, SumsInAGroup) {
  const int gpus = std::min(test::nccl_gpus(), 4);
  if (gpus < 2) GTEST_SKIP() << "needs NCCL and two GPUs";
  auto hosts = make_in_process_transports(gpus, 0);
  std::vector<int> all(gpus);
  std::iota(all.begin(), all.end(), 0);
  test::run_on_threads(gpus, [&](int rank) {
    const Device device = Device::open("cuda", rank);
    const OnStream here(device.compute());
    const auto place = at::TensorOptions(at::kFloat).device(device.where());
    const auto end =
        make_nccl_transport(std::shared_ptr<Transport>(std::move(hosts[rank])), load_nccl(), device, {}, {}, all);
    for (int round = 0; round < 50; ++round) {
      at::Tensor sum = at::full({1 << 16}, rank + round, place);
      all_reduce_sum(*end, sum, kLong);
      EXPECT_EQ(sum.mean().item<double>(), gpus * (gpus - 1) / 2.0 + gpus * round);
      const at::Tensor part = at::full({1 << 16}, rank, place);
      ReduceScatter scattered(*end, {part}, {round % gpus}, 1);
      wait_for(scattered, kLong);
      EXPECT_EQ(part.mean().item<double>(), rank == round % gpus ? gpus * (gpus - 1) / 2.0 : rank);
      GroupSums& sums = *group_sums_for(*end, part);
      sums.wait(sums.broadcast({part}, {round % gpus}), kLong);
      EXPECT_EQ(part.mean().item<double>(), gpus * (gpus - 1) / 2.0);
    }
    barrier(*end, kLong);
  });
}

// This test runs on real GPUs, with tensors that stay there.
TEST(NcclOnGpus, SumsAndMessagesWithoutHostCopies) {
  const int gpus = std::min(test::nccl_gpus(), 4);
  if (gpus < 2) GTEST_SKIP() << "needs NCCL and two GPUs";
  auto hosts = make_in_process_transports(gpus, 0);
  test::run_on_threads(gpus, [&](int rank) {
    const Device device = Device::open("cuda", rank);
    const OnStream here(device.compute());
    const auto place = at::TensorOptions(at::kFloat).device(device.where());
    const auto end = make_nccl_transport(std::shared_ptr<Transport>(std::move(hosts[rank])), load_nccl(), device,
                                         test::all_links(gpus));
    for (int round = 0; round < 50; ++round) {
      at::Tensor sum = at::full({1 << 16}, rank + round, place);
      all_reduce_sum(*end, sum, kLong);
      EXPECT_EQ(sum.mean().item<double>(), gpus * (gpus - 1) / 2.0 + gpus * round);
      const int next = (rank + 1) % gpus;
      at::Tensor sent = at::full({1 << 20}, round, place);
      for (int i = 0; i < 10; ++i) sent = sent + 1;
      end->isend(next, forward(next, round), {sent});
      sent.reset();
      const Values values = end->receive((rank + gpus - 1) % gpus, forward(rank, round), kLong);
      EXPECT_EQ(values.at(0).device(), device.where());
      EXPECT_EQ(values.at(0).mean().item<double>(), round + 10);
    }
    end->flush(kLong);
  });
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
