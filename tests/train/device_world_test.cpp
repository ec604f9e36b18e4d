// Tests whole runs of processes that were started without MPI. Their messages go through the store where they met, and
// their tensors through the stand-in for NCCL. They give the bits of a run in one process.
#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <thread>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include "tests/every_way.h"
#include "tests/graph/mlp_bundle.h"
#include "tests/nn/device/stand_in_device.h"
#include "tests/train/helpers.h"
#include "tests/train/worlds.h"
#include "tests/transport/counted.h"
#include "tests/transport/device_transports.h"
#include "tests/transport/stand_in_nccl.h"
#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/data/data.h"
#include "twobp/nn/kernels/rows/operators.h"
#include "twobp/pipeline/memory/memory_meter.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/pipeline_shape.h"
#include "twobp/train/build_model.h"
#include "twobp/transport/collectives.h"
#include "twobp/transport/start.h"
#include "twobp/transport/store/store_connection.h"
#include "twobp/transport/threads/in_process.h"

namespace twobp::TWOBP_FILE {
namespace {

constexpr int kSteps = 3;
constexpr double kNoSpin = 0;  // there are more ranks than cores

Config config_of(const std::string& schedule, int replicas) {
  Config config = test::world_config(schedule, 2);
  config.pipeline.data_parallel = replicas;
  return config;
}

using End = std::shared_ptr<Transport>;

// Makes a world for each process. Their endpoints are made at the same time, because they wait for each other.
std::vector<World> worlds_of(const Config& config, const std::function<End(int process, int processes)>& make) {
  const int replicas = config.pipeline.data_parallel;
  const int processes = replicas * config.pipeline.ranks;
  std::vector<End> ends(processes);
  test::run_on_threads(processes, [&](int process) { ends[process] = make(process, processes); });
  std::vector<World> worlds;
  for (End& end : ends) worlds.push_back(make_process_world(std::move(end), replicas, config.pipeline.ranks));
  return worlds;
}

void expect_bits_of_threads(const Config& config, std::vector<World> worlds) {
  const auto expected = test::run_in(
      make_in_process_ranks(config.pipeline.data_parallel, config.pipeline.ranks, kNoSpin), config, kSteps);
  test::expect_same_run(expected, test::run_in(std::move(worlds), config, kSteps), config.pipeline.schedule);
}

class WithoutMpi : public ::testing::TestWithParam<std::pair<const char*, int>> {
 protected:
  static Config config() { return config_of(GetParam().first, GetParam().second); }
};

TEST_P(WithoutMpi, ThroughTheStore) {
  const int port = test::free_port();
  expect_bits_of_threads(config(), worlds_of(config(), [&](int process, int processes) -> End {
                           StorePlace place;
                           place.address = "localhost";
                           place.port = port;
                           place.rank = process;
                           place.size = processes;
                           return make_store_transport(std::make_shared<StoreConnection>(place, 60));
                         }));
}

// A store that counts: what processes ask of it until their trainers are made.
TEST(StoreRequests, AtTheStartGrowWithTheNumberOfProcesses) {
  constexpr int kProcesses = 16;
  Config config = test::tiny_config();
  config.pipeline.ranks = kProcesses;
  config.pipeline.stages = 0;
  config.pipeline.micro_batches = 2;
  config.train.clip_norm = 1;
  test::llama_of(config).dim = test::llama_of(config).hidden = 8;
  test::llama_of(config).heads = test::llama_of(config).kv_heads = 1;
  test::llama_of(config).layers = kProcesses / 2;
  const int port = test::free_port();
  std::vector<std::shared_ptr<StoreConnection>> connections(kProcesses);
  std::vector<World> worlds = worlds_of(config, [&](int rank, int processes) -> End {
    const StorePlace place{.address = "127.0.0.1", .port = port, .rank = rank, .size = processes};
    connections[rank] = std::make_shared<StoreConnection>(place, 60);
    return make_store_transport(connections[rank]);
  });
  const auto requests = [&] {
    int64_t sum = 0;
    for (const auto& connection : connections) sum += connection->requests();
    return sum;
  };
  std::barrier together(kProcesses);
  std::atomic<int64_t> begun = 0, second = 0, third = 0;
  run_worlds(std::move(worlds), [&](World world) {
    Trainer trainer(config, std::move(world));
    together.arrive_and_wait();
    begun = requests();
    together.arrive_and_wait();
    trainer.step();  // agrees on caps
    together.arrive_and_wait();
    second = requests();
    together.arrive_and_wait();
    trainer.step();
    together.arrive_and_wait();
    third = requests();
    together.arrive_and_wait();
  });
  EXPECT_LE(begun, 40 * kProcesses);
  // Control, and F and I, each pushed and popped.
  EXPECT_LE(third - second, 2 * (4 * kProcesses + 2 * 2 * kProcesses));
}

TEST_P(WithoutMpi, ThroughTheStandInForNccl) {
  test::stand_in_nccl_state().bytes = 0;
  const int size = config().pipeline.ranks * config().pipeline.data_parallel;
  auto hosts = make_in_process_transports(size, kNoSpin);
  expect_bits_of_threads(config(), worlds_of(config(), [&](int process, int processes) -> End {
                           const Device device = test::stand_in_device(process);
                           NcclOptions options;
                           options.tensors = at::kCPU;
                           return test::by_way_of(
                               device, make_nccl_transport(End(std::move(hosts[process])), test::stand_in_nccl(),
                                                           device, test::all_links(processes), options));
                         }));
  EXPECT_GT(test::stand_in_nccl_state().bytes, 100000) << "the messages did not go through NCCL";
}

INSTANTIATE_TEST_SUITE_P(All, WithoutMpi,
                         ::testing::Values(std::pair("1f1b", 1), std::pair("zb-v", 1), std::pair("1f1b", 2)),
                         [](const auto& info) {
                           std::string name = concat(info.param.first, "_x", info.param.second);
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

// These are processes whose ranks have a device each. Weights, activations and gradients lie on it, and move from
// device to device.
struct OnDevices {
  const char* name;
  const char* schedule;
  int ranks;
  int replicas;
  void (*change)(Config& config) = nullptr;
  int together = 1;   // ranks of a process
  int bytes = 10000;  // at least, through NCCL
};

std::vector<World> worlds_on_devices(const Config& config, int together = 1,
                                     std::vector<std::unique_ptr<Transport>> hosts = {}) {
  const int ranks = config.pipeline.ranks;
  const int replicas = config.pipeline.data_parallel;
  if (hosts.empty()) hosts = make_in_process_transports(ranks * replicas, kNoSpin);
  std::vector<std::optional<World>> made(ranks * replicas / together);
  NcclOptions options;
  options.tensors = at::kPrivateUse1;
  options.timeout = config.pipeline.timeout;
  options.group_sums = config.pipeline.sums == "nccl";
  test::run_on_threads(static_cast<int>(made.size()), [&](int process) {
    const Ends ends(together, [&](int i) { return std::move(hosts[process * together + i]); });
    std::vector<Device> devices;
    for (int i = 0; i < together; ++i) devices.push_back(test::stand_in_device(process * together + i));
    made[process].emplace(make_nccl_world(ends, test::stand_in_nccl(), devices, replicas, ranks,
                                          pipeline_shape(config.pipeline).rank_of_stage, options));
  });
  std::vector<World> worlds;
  for (auto& world : made) worlds.push_back(std::move(*world));
  return worlds;
}

// Threads of this process with a device each.
std::vector<World> threads_on_devices(const Config& config) {
  const int ranks = config.pipeline.ranks;
  const int replicas = config.pipeline.data_parallel;
  std::vector<Device> devices;
  for (int rank = 0; rank < ranks * replicas; ++rank) devices.push_back(test::stand_in_device(rank));
  return make_in_process_worlds(replicas, ranks, kNoSpin, devices);
}

class ProcessesOnDevices : public ::testing::TestWithParam<OnDevices> {
 protected:
  static Config config() {
    const OnDevices& given = GetParam();
    Config config = test::world_config(given.schedule, given.ranks);
    config.pipeline.data_parallel = given.replicas;
    if (given.change) given.change(config);
    return config;
  }
  static int processes() { return GetParam().ranks * GetParam().replicas; }
};

TEST_P(ProcessesOnDevices, HaveTheBitsOfThreads) {
  const int ranks = GetParam().ranks;
  const int replicas = GetParam().replicas;
  std::optional<test::RunOutcome> on_cpus;
  Config config = ProcessesOnDevices::config();
  if (config.train.precision == "fp32") {  // a CPU may compute products of 16-bit types in float32
    const OperatorsEverywhere operators;
    on_cpus = test::run_in(make_in_process_ranks(replicas, ranks, kNoSpin), config, kSteps);
  }
  config.pipeline.device = "privateuseone";
  const auto expected = test::run_in(threads_on_devices(config), config, kSteps);
  if (on_cpus) test::expect_same_run(*on_cpus, expected, "threads on devices");

  test::stand_in_nccl_state().bytes = 0;
  test::stand_in_nccl_state().group_calls = 0;
  test::expect_same_run(expected, test::run_in(worlds_on_devices(config, GetParam().together), config, kSteps),
                        "processes on devices");
  EXPECT_GE(test::stand_in_nccl_state().bytes, processes() > 1 ? GetParam().bytes : 0)
      << "the messages did not go through NCCL";
  EXPECT_EQ(test::stand_in_nccl_state().group_calls > 0, config.pipeline.sums == "nccl");
}

void bert(Config& config) {
  test::make_bert(config, test::kSequence, 0.2);
}
void mamba(Config& config) {
  test::make_mamba(config).state = 5;
}
void resnet(Config& config) {
  test::make_tiny_resnet(config);
  config.model.type.as<ResnetOptions>().depths = {2, 2};
}
// Enough layers for the stages of four ranks with two stages each.
void deep(Config& config) {
  test::llama_of(config).layers = 4;
}
void placed(Config& config) {
  config.pipeline.p2 = "placed";
}
void ahead(Config& config) {
  config.pipeline.run_ahead = "on";
}
void fp16(Config& config) {
  config.train.precision = "fp16";
}
void grouped(Config& config) {
  config.pipeline.sums = "nccl";
}
void in_pieces(Config& config) {
  config.pipeline.bucket = "3KiB";
}
void sharded(Config& config) {
  config.optimizer.shard = true;
}
void streamed(Config& config) {
  config.train.clip_norm = 0;
  config.optimizer.lr = 1e-4;  // nothing clips
  config.pipeline.gradients = "streamed";
}
template <void (*... changes)(Config& config)>
void all_of(Config& config) {
  (changes(config), ...);
}

// A bundle, with a tied weight, changed buffers and dropout.
void captured(Config& config) {
  static const test::TempFolder folder;
  static const bool written = (test::write_bundle(folder, {.middle = 5}), true);
  EXPECT_TRUE(written);
  test::use_bundle(config, folder);
  config.pipeline.micro_batch_size = test::kSamples;
}

INSTANTIATE_TEST_SUITE_P(
    All, ProcessesOnDevices,
    ::testing::Values(
        OnDevices{"One", "1f1b", 1, 1}, OnDevices{"Two", "1f1b", 2, 1}, OnDevices{"TwoZbV", "zb-v", 2, 1},
        OnDevices{"Four", "1f1b", 4, 1}, OnDevices{"TwoReplicas", "1f1b", 1, 2},
        OnDevices{"TwoByTwo", "1f1b", 2, 2, in_pieces}, OnDevices{"TwoByTwoZbV", "zb-v", 2, 2},
        OnDevices{"Shards", "1f1b", 2, 2, sharded}, OnDevices{"RunsAhead", "interleaved-1f1b", 2, 2, ahead},
        OnDevices{"Bf16", "zb-v", 2, 2, [](Config& c) { c.train.precision = "bf16"; }},
        OnDevices{"Fp16", "1f1b", 2, 2, fp16}, OnDevices{"Off", "1f1b", 2, 2, [](Config& c) { c.pipeline.p2 = "off"; }},
        OnDevices{"ResnetTwo", "1f1b", 2, 1, test::make_tiny_resnet},
        OnDevices{"ResnetZbV", "zb-v", 2, 1, test::make_tiny_resnet},
        OnDevices{"ResnetTwoByTwo", "1f1b", 2, 2, test::make_tiny_resnet}, OnDevices{"BertZbV", "zb-v", 2, 1, bert},
        OnDevices{"BertTwoByTwo", "1f1b", 2, 2, bert}, OnDevices{"MambaZbV", "zb-v", 2, 1, mamba},
        OnDevices{"MambaTwoByTwo", "1f1b", 2, 2, mamba},
        // Each model on 1, 2 and 4 ranks, with 1 and 2 replicas, under each schedule, with W placed too.
        OnDevices{"FourByTwoInterleaved", "interleaved-1f1b", 4, 2, deep},
        OnDevices{"TwoByTwoPlaced", "zb-h1", 2, 2, placed}, OnDevices{"ResnetReplicas", "1f1b", 1, 2, resnet},
        OnDevices{"ResnetTwoByTwoInterleaved", "interleaved-1f1b", 2, 2, resnet},
        OnDevices{"ResnetFourPlaced", "zb-h1", 4, 1, all_of<placed, resnet>},
        OnDevices{"BertReplicasZbV", "zb-v", 1, 2, bert},
        OnDevices{"BertFourInterleaved", "interleaved-1f1b", 4, 1, all_of<deep, bert>},
        OnDevices{"BertTwoByTwoPlaced", "zb-h1", 2, 2, all_of<placed, bert>},
        OnDevices{"MambaReplicasInterleaved", "interleaved-1f1b", 1, 2, mamba},
        OnDevices{"MambaTwoInterleaved", "interleaved-1f1b", 2, 1, mamba},
        OnDevices{"MambaFourByTwoPlaced", "zb-h1", 4, 2, all_of<placed, mamba>},
        OnDevices{"CapturedTwo", "1f1b", 2, 1, captured, 1, /*bytes=*/2000},
        OnDevices{"CapturedTwoByTwo", "zb-v", 2, 2, captured}, OnDevices{"AReplicaAProcess", "1f1b", 2, 2, nullptr, 2},
        // The stand-in sums in the order of the replicas, so the bits are the same.
        OnDevices{"Grouped", "zb-v", 2, 2, grouped}, OnDevices{"GroupedFourReplicas", "1f1b", 1, 4, grouped},
        OnDevices{"GroupedShards", "1f1b", 2, 2, all_of<grouped, sharded, in_pieces>},
        OnDevices{"GroupedShardsFour", "1f1b", 1, 4, all_of<grouped, sharded>},
        OnDevices{"GroupedRunsAhead", "interleaved-1f1b", 2, 2, all_of<grouped, ahead>},
        OnDevices{"GroupedFp16", "1f1b", 2, 2, all_of<grouped, fp16, in_pieces>},
        OnDevices{"GroupedResnet", "1f1b", 2, 2, all_of<grouped, resnet>},
        OnDevices{"GroupedCaptured", "zb-v", 2, 2, all_of<grouped, captured>},
        OnDevices{"GroupedReplicaAProcess", "1f1b", 2, 2, grouped, 2}, OnDevices{"Streamed", "1f1b", 2, 1, streamed},
        OnDevices{"StreamedTwoByTwo", "zb-v", 2, 2, streamed},
        OnDevices{"StreamedResnet", "1f1b", 2, 2, all_of<streamed, resnet>},
        OnDevices{"StreamedShards", "1f1b", 2, 2, all_of<streamed, sharded, in_pieces>},
        OnDevices{"StreamedCaptured", "zb-v", 2, 2, all_of<streamed, captured>, 1, /*bytes=*/9000},
        OnDevices{"StreamedGrouped", "zb-v", 2, 2, all_of<streamed, sharded, grouped>},
        OnDevices{"TwoRanksAProcess", "zb-v", 4, 1, [](Config& c) { test::llama_of(c).layers = 4; }, 2}),
    [](const auto& info) { return std::string(info.param.name); });

// From the second step on, what F and I hand on has no head: only control goes through the host, and every transfer has
// its other side.
TEST(StaticMessagesOnDevices, LeaveControlToTheHost) {
  for (const char* schedule : {"1f1b", "zb-v"}) {
    Config config = test::world_config(schedule, 4);
    test::llama_of(config).tied = false;
    config.pipeline.micro_batches = 6;
    config.pipeline.device = "privateuseone";
    deep(config);
    std::vector<std::unique_ptr<Transport>> hosts;
    std::vector<test::Counted*> counted;
    for (auto& host : make_in_process_transports(4, kNoSpin)) {
      counted.push_back(new test::Counted(std::move(host)));
      hosts.emplace_back(counted.back());
    }
    test::stand_in_nccl_state().unmatched = 0;
    std::barrier together(4);
    run_worlds(worlds_on_devices(config, 1, std::move(hosts)), [&](World world) {
      test::Counted& mine = *counted[world.process()];
      Trainer trainer(config, std::move(world));
      const auto sent_in_a_step = [&] {
        together.arrive_and_wait();
        mine.sent();
        together.arrive_and_wait();
        trainer.step();
        together.arrive_and_wait();
        return test::sum_of(mine.sent());
      };
      EXPECT_GE(sent_in_a_step(), 6) << "heads teach the forms";
      sent_in_a_step();  // agrees on caps
      EXPECT_LE(sent_in_a_step(), 4) << schedule;
    });
    EXPECT_EQ(test::stand_in_nccl_state().unmatched, 0) << schedule;
  }
}

// An identity layer that counts its F, I and W.
class Counts : public Layer {
 public:
  explicit Counts(std::array<std::atomic<int>, 3>& counts) : counts_(counts) {}
  Values forward(Values x, Context& /*context*/, Saved& /*saved*/) override {
    EXPECT_TRUE(counts_[0]++ > 0 || test::transfers() == 0);
    return x;
  }
  Values backward_p1(Values dy, Context& /*context*/, Saved& saved) override {
    ++counts_[1];
    saved.keep_until_p2(dy[0]);
    return dy;
  }
  void backward_p2(std::span<Saved* const> saved) override {
    counts_[2] += static_cast<int>(saved.size());
    for (Saved* one : saved) one->p2(0);
  }
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override { units.push_back({this, &saved}); }

 private:
  std::array<std::atomic<int>, 3>& counts_;
};

// A kernel's first launch may wait for the whole GPU, and so for a transfer.
TEST(FirstLaunches, OfEveryProcessComeBeforeTransfers) {
  Config config = test::world_config("1f1b", 2);
  config.pipeline.device = "privateuseone";
  std::array<std::array<std::atomic<int>, 3>, 2> counts{};  // by process
  std::vector<World> worlds = worlds_on_devices(config);
  const int64_t connected = test::stand_in_nccl_state().bytes;
  std::barrier together(2);
  run_worlds(std::move(worlds), [&](World world) {
    auto& mine = counts[world.process()];
    ModelSpec model = build_model(config);
    model.layers.insert(model.layers.begin() + 2,
                        {"counts", "counts", [&mine] { return std::make_unique<Counts>(mine); }});
    DataSplit data = open_data(config.data, config.model.input(), config.train.seed);
    Trainer trainer(config, model, std::move(data), std::move(world));
    together.arrive_and_wait();
    for (const auto& count : mine) EXPECT_GE(count, 1);
    EXPECT_EQ(test::stand_in_nccl_state().bytes, connected);
    together.arrive_and_wait();
    trainer.step();
  });
  EXPECT_GT(test::stand_in_nccl_state().bytes, connected);
}

// Gradients go to the replica that updates them, and its weights to the others: as many bytes as sums that all replicas
// get.
TEST(ShardsOnDevices, SendAsMuchAsWholeSums) {
  const auto bytes = [](bool shard) {
    Config config = config_of("1f1b", 2);
    test::llama_of(config).tied = false;  // of a tied weight, all replicas get the sum
    config.optimizer.shard = shard;
    config.pipeline.device = "privateuseone";
    test::stand_in_nccl_state().bytes = 0;
    test::run_in(worlds_on_devices(config), config, kSteps);
    return static_cast<double>(test::stand_in_nccl_state().bytes);
  };
  const double whole = bytes(false);
  EXPECT_GT(whole, 10000);
  EXPECT_NEAR(bytes(true) / whole, 1, 0.05);
}

// Changes nothing. While it is armed, I holds up the stream until ready().
class Holds : public Layer {
 public:
  struct Control {
    std::atomic<bool> armed = false;
    std::function<bool()> ready;
  };
  explicit Holds(std::shared_ptr<Control> control) : control_(std::move(control)) {}
  Values forward(Values x, Context&, Saved&) override { return x; }
  Values backward_p1(Values dy, Context&, Saved&) override {
    if (control_->armed) {
      const c10::impl::VirtualGuardImpl device(at::kPrivateUse1);
      test::hold(DeviceStream(device.getStream(device.getDevice())), control_->ready);
    }
    return dy;
  }

 private:
  std::shared_ptr<Control> control_;
};

// The sum of the head's gradients ends while the device still computes I of the first layers.
TEST(SumsOnDevices, GoOnWhileTheDeviceComputes) {
  Config config = test::world_config("1f1b", 1);
  test::llama_of(config).tied = false;
  test::llama_of(config).vocab = 20000;  // most of the bytes
  config.pipeline.data_parallel = 2;
  config.pipeline.micro_batches = 1;
  config.pipeline.p2 = "off";
  config.pipeline.bucket = "1";
  config.pipeline.device = "privateuseone";
  const int64_t head = 4 * 20000 * test::llama_of(config).dim;
  std::atomic<int64_t> before = 0;
  std::atomic<int> too_late = 0;
  run_worlds(worlds_on_devices(config), [&](World world) {
    auto control = std::make_shared<Holds::Control>();
    ModelSpec model = build_model(config);
    model.layers.insert(model.layers.begin() + 1,
                        {"holds", "holds", [control] { return std::make_unique<Holds>(control); }});
    Trainer trainer(config, model, open_data(config.data, config.model.input(), 1), std::move(world));
    trainer.step();
    const double end = now_seconds() + 20;
    control->ready = [&, end] {  // each rank has received its parts, and then the sum of the others
      if (test::stand_in_nccl_state().bytes > before + head * 3 / 2) return true;
      if (now_seconds() < end) return false;
      ++too_late;
      return true;
    };
    barrier(*trainer.world().processes, 60);
    before = test::stand_in_nccl_state().bytes.load();
    barrier(*trainer.world().processes, 60);
    control->armed = true;
    trainer.step();
    control->armed = false;
  });
  EXPECT_EQ(too_late, 0);
}

// NCCL's watch frees what has been sent, and the meter of the thread that sent it sees that.
TEST(NcclMemory, IsOffTheBooksWhenItHasLeft) {
  auto hosts = make_in_process_transports(2, kNoSpin);
  test::run_on_threads(2, [&](int rank) {
    const Device device = test::stand_in_device(40 + rank);
    NcclOptions options;
    options.tensors = at::kPrivateUse1;
    const auto transport =
        make_nccl_transport(End(std::move(hosts[rank])), test::stand_in_nccl(), device, test::all_links(2), options);
    const OnStream here(device.compute());
    if (rank == 1) {
      EXPECT_EQ(transport->receive(0, {.step = 1}, 30).at(0).numel(), 1 << 16);
      transport->receive(0, {.step = 2}, 60);
      return;
    }
    MemoryMeter meter({0});
    const MemoryMeter::Watch watch(meter);
    {
      const MemoryMeter::Scope scope(0, MemoryCategory::kActivations);
      at::Tensor sent = at::zeros({1 << 16}, at::TensorOptions().device(device.where()));
      EXPECT_GT(meter.held(0), 1 << 16);
      transport->isend(1, {.step = 1}, {std::move(sent)});
    }
    const double end = now_seconds() + 20;
    const auto held = [&] { return meter.held(0) > 4096; };  // less: the message's description
    while (held() && now_seconds() < end) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    EXPECT_FALSE(held()) << meter.held(0);
    transport->isend(1, {.step = 2}, {});
  });
}

Config half_precision(const char* schedule, double loss_scale) {
  Config config = config_of(schedule, 2);
  config.pipeline.device = "privateuseone";
  config.train.precision = "fp16";
  config.train.loss_scale = loss_scale;
  return config;
}

// Gradients overflow on some ranks. All processes skip these steps, and change no weight in them.
TEST(ProcessesInFloat16, SkipTheSameSteps) {
  constexpr int kMore = 8;
  for (const char* schedule : {"1f1b", "zb-v"}) {
    if (schedule == std::string_view("1f1b") && !test::every_way()) continue;
    const Config config = half_precision(schedule, 0x1p22);
    const auto expected = test::run_in(threads_on_devices(config), config, kMore);
    EXPECT_FALSE(expected.skipped.empty()) << schedule;
    EXPECT_LT(expected.skipped.size(), kMore) << schedule;
    test::expect_same_run(expected, test::run_in(worlds_on_devices(config), config, kMore), schedule);
  }
}

// The loss scale doubles after the second step, so that the gradients of a later step overflow. The ranks that have
// gone on by then undo that step, on all processes.
TEST(ProcessesInFloat16, UndoAStepThatOverflows) {
  constexpr int kMore = 8;
  Config config = half_precision("1f1b", 0x1p22);
  test::llama_of(config).tied = false;  // otherwise ranks wait for each other's gradients
  config.optimizer.lr = 1e-4;           // so that gradients differ by batch instead of shrinking
  config.train.clip_norm = 0;
  config.train.steps = kMore;
  config.pipeline.run_ahead = "off";
  std::atomic<double> highest = 0;  // of the scales that do not overflow
  test::run_in(threads_on_devices(config), config, 0, [&](Trainer& trainer) {
    StepResult result;
    do result = trainer.step();
    while (result.skipped);
    highest = result.loss_scale;
  });
  const auto run = [&](std::vector<World> worlds) {
    return test::run_in(std::move(worlds), config, kMore, [&](Trainer& trainer) {
      trainer.go_on_from({0, 0, highest.load(), LossScale::kGrowthSteps - 2});
    });
  };
  const auto expected = run(threads_on_devices(config));
  ASSERT_FALSE(expected.skipped.empty());
  const int64_t overflows = expected.skipped.front();
  ASSERT_GE(overflows, 3);
  config.pipeline.run_ahead = "on";
  int64_t taken_back = 0;
  for (const char* seconds : {"0.1", "1", "5"}) {  // longer if the machine is busy
    for (const int late : {0, 1}) {
      const test::Environment fault("TWOBP_FAIL",
                                    concat("optimizer:step=", overflows, ":rank=", late, ":seconds=", seconds));
      const auto actual = run(worlds_on_devices(config));
      test::expect_same_run(expected, actual, concat("rank ", late, " late"));
      taken_back += actual.taken_back;
    }
    if (taken_back > 0) break;
  }
  EXPECT_GT(taken_back, 0);
}

// One of 2 x 2 processes fails or freezes between two steps. All processes end soon with one error that gives the
// reason.
struct EndOfRun {
  std::string error;
  int aborted = 0;  // processes that ended because another one had
};
EndOfRun end_of_run(const std::function<void(World& world)>& instead_of_a_step) {
  Config config = config_of("1f1b", 2);
  config.pipeline.device = "privateuseone";
  config.pipeline.timeout = 5;
  const double begin = now_seconds();
  std::atomic<int> aborted = 0;
  std::string what = "no error";
  try {
    run_worlds(worlds_on_devices(config), [&](World given) {
      const int process = given.process();
      try {
        Trainer trainer(config, std::move(given));
        trainer.step();
        if (process == 3) instead_of_a_step(const_cast<World&>(trainer.world()));
        trainer.step();
      } catch (const Aborted&) {
        ++aborted;
        throw;
      }
    });
  } catch (const std::exception& error) {
    what = error.what();
  }
  EXPECT_LT(now_seconds() - begin, 30);
  return {what, aborted};
}

// Describes the messages of F, also those whose receiver expects no description, from the third step on.
class Describes : public Transport {
 public:
  explicit Describes(End to) : to_(std::move(to)) {}
  int rank() const override { return to_->rank(); }
  int size() const override { return to_->size(); }
  void isend(int to, const Tag& tag, Values values) override { to_->isend(to, tag, std::move(values)); }
  bool expect(int from, const Tag& tag, const Forms& forms) override { return to_->expect(from, tag, forms); }
  void isend_expected(int to, const Tag& tag, Values values) override {
    if (tag.kind == MessageKind::kForward && tag.step >= 3) return isend(to, tag, std::move(values));
    to_->isend_expected(to, tag, std::move(values));
  }
  bool try_receive(int from, const Tag& tag, Values& values) override { return to_->try_receive(from, tag, values); }
  Values receive(int from, const Tag& tag, double timeout) override { return to_->receive(from, tag, timeout); }
  void progress() override { to_->progress(); }
  std::optional<int> unsent_to() override { return to_->unsent_to(); }
  void abort(const std::string& reason) override { to_->abort(reason); }
  std::optional<Failure> first_failure() const override { return to_->first_failure(); }

 private:
  End to_;
};

TEST(ProcessesThatEnd, ADescriptionWhereNoneIsDueIsNamed) {
  const Config config = config_of("1f1b", 1);
  auto hosts = make_in_process_transports(2, kNoSpin);
  NcclOptions options;
  options.tensors = at::kCPU;
  auto worlds = worlds_of(config, [&](int process, int processes) -> End {
    const Device device = test::stand_in_device(process);
    return std::make_shared<Describes>(
        test::by_way_of(device, make_nccl_transport(End(std::move(hosts[process])), test::stand_in_nccl(), device,
                                                    test::all_links(processes), options)));
  });
  std::atomic<int> aborted = 0;
  test::expect_error(
      [&] {
        run_worlds(std::move(worlds), [&](World world) {
          Trainer trainer(config, std::move(world));
          try {
            for (int step = 0; step < 50; ++step) trainer.step();  // those that come early are taken
          } catch (const Aborted&) {
            ++aborted;
            throw;
          }
        });
      },
      {"rank 0 sent a description of the input of stage 1, micro-batch ", ", step ", "rank 1 expects", "without one"});
  EXPECT_EQ(aborted, 1);
}

TEST(ProcessesThatEnd, WithAnErrorEndAllWithIt) {
  const EndOfRun end = end_of_run([](World&) { fail("the test says so"); });
  EXPECT_EQ(end.error, "the test says so");
  EXPECT_EQ(end.aborted, 3);
}

TEST(ProcessesThatEnd, WhenOneIsFrozenItIsNamed) {
  const EndOfRun end = end_of_run([](World& world) {
    try {
      while (true) {
        world.processes->progress();
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
    } catch (const Aborted&) {
    }
  });
  const auto says = [&](const char* part) { return end.error.find(part) != std::string::npos; };
  // Its neighbour in the replica, or that in the pipeline, whose message it does not take, is the first to end.
  EXPECT_TRUE(says("waited 5 s") || (says("to rank 3") && says("has not arrived in 5 s"))) << end.error;
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
