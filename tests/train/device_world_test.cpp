// Whole runs of processes that were started without MPI. Their messages go through the store where they met,
// and their tensors through the stand-in for NCCL. They give the bits of a run in one process.
#include <gtest/gtest.h>

#include "tests/nn/device/stand_in_device.h"
#include "tests/train/helpers.h"
#include "tests/train/worlds.h"
#include "tests/transport/device_transports.h"
#include "tests/transport/stand_in_nccl.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/transport/process_world.h"
#include "twobp/transport/store/store_transport.h"
#include "twobp/transport/threads/in_process.h"

namespace twobp::TWOBP_FILE {
namespace {

constexpr int kSteps = 3;
constexpr double kNoSpin = 0;  // more ranks than cores

Config config_of(const std::string& schedule, int replicas) {
  Config config = test::world_config(schedule, 2);
  config.pipeline.data_parallel = replicas;
  return config;
}

using End = std::shared_ptr<Transport>;

// A world for each process, their endpoints made at once, since they wait for each other.
std::vector<World> worlds_of(const Config& config,
                             const std::function<End(int process, int processes)>& make) {
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

TEST_P(WithoutMpi, ThroughTheStandInForNccl) {
  test::stand_in_nccl_state().bytes = 0;
  const int size = config().pipeline.ranks * config().pipeline.data_parallel;
  auto hosts = make_in_process_transports(size, kNoSpin);
  expect_bits_of_threads(config(), worlds_of(config(), [&](int process, int processes) -> End {
                           const Device device = test::stand_in_device(process);
                           NcclOptions options;
                           options.tensors = at::kCPU;
                           return test::by_way_of(
                               device,
                               make_nccl_transport(End(std::move(hosts[process])), test::stand_in_nccl(),
                                                   device, test::all_links(processes), options));
                         }));
  EXPECT_GT(test::stand_in_nccl_state().bytes, 100000) << "it went that way";
}

INSTANTIATE_TEST_SUITE_P(All, WithoutMpi,
                         ::testing::Values(std::pair("1f1b", 1), std::pair("zb-v", 1), std::pair("1f1b", 2)),
                         [](const auto& info) {
                           std::string name = concat(info.param.first, "_x", info.param.second);
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace twobp::TWOBP_FILE
