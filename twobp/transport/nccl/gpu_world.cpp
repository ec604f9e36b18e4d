// The world of a process whose ranks compute on GPUs.
#include <array>
#include <cstdlib>
#include <map>
#include <unistd.h>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/nn/device/gpu.h"
#include "twobp/transport/mpi/mpi.h"
#include "twobp/transport/nccl/nccl.h"
#include "twobp/transport/processes.h"
#include "twobp/transport/start.h"
#include "twobp/transport/store/store_connection.h"
#include "twobp/transport/subgroup.h"

namespace twobp {
namespace {

using nlohmann::json;

std::string host_name() {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  return name.data();
}

// What these endpoints carry lies in host memory.
Ends make_hosts(const StartOptions& options, const Launcher& launcher, int here) {
  if (launcher.kind == Launcher::Kind::kMpi && has_mpi()) {
    TWOBP_CHECK(here == 1, "mpirun started ", launcher.size, " processes for ", launcher.size * here,
                " ranks, but over MPI each process has one rank: start ", launcher.size * here, ", or use torchrun");
    return {1, [&](int) { return make_mpi_transport(launcher.size); }};
  }
  const StorePlace place = store_place(launcher);
  return {here, [&](int i) {
            StorePlace of_rank = place;
            of_rank.size = launcher.size * here;
            of_rank.rank = launcher.rank * here + i;
            return make_store_transport(std::make_shared<StoreConnection>(of_rank, options.timeout));
          }};
}

struct Here {
  int visible = 0;  // GPUs
  std::vector<Device> devices;
  std::vector<DeviceFacts> facts;
  NcclApi nccl;
};

// The ranks of a machine take its GPUs in turn. A launcher may show each process its own GPUs only, which are then
// numbered from 0.
Here open_gpus(const StartOptions& options, int local_rank, int here) {
  Here opened;
  opened.visible = Device::count(options.device);
  for (int i = 0; i < here; ++i) {
    opened.devices.push_back(Device::open(options.device, (local_rank * here + i) % opened.visible));
    const at::Device where = opened.devices.back().where();
    opened.facts.push_back(device_support(where.type()).facts(where));
  }
  // Of this thread, too: it would otherwise use device 0, and so hold memory on another process's GPU.
  const at::Device first = opened.devices.front().where();
  c10::impl::VirtualGuardImpl(first.type()).setDevice(first);
  opened.nccl = load_nccl();
  return opened;
}

// What to do about two ranks on one GPU. `ranks`: on that machine.
std::string advice(int visible, int ranks, int local_rank, int other_local_rank) {
  if (visible < ranks) {
    return concat(visible, visible == 1 ? " GPU is" : " GPUs are", " visible for ", ranks,
                  " ranks: start fewer ranks on this machine, or make more of its GPUs visible "
                  "(CUDA_VISIBLE_DEVICES); ranks of one process without a launcher may share");
  }
  if (local_rank == other_local_rank) {
    return concat("both processes have local rank ", local_rank, ", though ", visible, " GPUs are visible for ", ranks,
                  " ranks: have the launcher count the processes of a machine (LOCAL_RANK)");
  }
  return "have the launcher give each process its own (CUDA_VISIBLE_DEVICES)";
}

// What is wrong, or nothing. `texts`: by process.
std::string compare(const std::vector<std::string>& texts) {
  struct User {
    int rank = 0;
    int local_rank = 0;
  };
  std::map<std::string, User> user_of;  // by the GPU's id
  std::map<std::string, int> ranks_on;  // by machine
  std::vector<json> told;
  for (const std::string& text : texts) {
    told.push_back(json::parse(text));
    ranks_on[told.back().at("machine")] += static_cast<int>(told.back().at("gpus").size());
  }
  std::string first_model;
  int rank = 0;
  for (const json& process : told) {
    const auto machine = process.at("machine").get<std::string>();
    if (const auto error = process.at("error").get<std::string>(); !error.empty())
      return concat("rank ", rank, " on ", machine, ": ", error);
    for (const json& gpu : process.at("gpus")) {
      const auto model = gpu.at("model").get<std::string>();
      const auto id = gpu.at("id").get<std::string>();
      if (rank == 0) first_model = model;
      if (model != first_model) {
        return concat("rank 0 computes on a GPU of model \"", first_model, "\", but rank ", rank, " on ", machine,
                      " on one of model \"", model,
                      "\": stages are cut, and results repeat, for one model: choose machines alike");
      }
      const int local_rank = process.at("local_rank");
      const auto [found, is_new] = user_of.try_emplace(id, User{rank, local_rank});
      if (!is_new) {
        return concat("ranks ", found->second.rank, " and ", rank, " on ", machine, " share a GPU (", id,
                      "), but NCCL needs one for each: ",
                      advice(process.at("visible"), ranks_on[machine], local_rank, found->second.local_rank));
      }
      ++rank;
    }
  }
  return {};
}

}  // namespace

int ranks_of_process(const StartOptions& options, int processes) {
  const int ranks = options.ranks;
  const int64_t all = int64_t{ranks} * options.data_parallel;
  TWOBP_CHECK(processes <= all && all % processes == 0 && ranks % (all / processes) == 0, processes,
              processes == 1 ? " process was" : " processes were", " started, but pipeline.ranks ", ranks,
              " x pipeline.data_parallel ", options.data_parallel, " = ", all, ": start ", all,
              " (or fewer, so that each has as many ranks of one replica), or change these keys");
  return static_cast<int>(all / processes);
}

World make_gpu_world(const StartOptions& options, const Launcher& launcher) {
  const int here = ranks_of_process(options, launcher.size);
  return make_gpu_world(options, {.count = launcher.size, .local_rank = launcher.local_rank},
                        make_hosts(options, launcher, here));
}

World make_gpu_world(const StartOptions& options, const GpuProcess& process, const Ends& hosts) {
  // A kernel that is loaded on first use waits for the whole GPU, and thus for transfers that wait for a peer.
  set_cuda_variable("CUDA_MODULE_LOADING", "EAGER",
                    "a kernel's first launch may wait for a transfer that waits for it");
  // NCCL would otherwise connect a group anew when it first sums by another algorithm, within a step. Links have one
  // algorithm, and would only take more memory.
  if (sums_by_nccl(options)) setenv("NCCL_RUNTIME_CONNECT", "0", /*overwrite=*/0);
  const int here = hosts.size();
  Here opened;
  json told = {{"machine", host_name()},
               {"error", ""},
               {"local_rank", process.local_rank},
               {"visible", 0},
               {"gpus", json::array()}};
  try {
    opened = open_gpus(options, process.local_rank, here);
    told["visible"] = opened.visible;
    for (const DeviceFacts& facts : opened.facts) told["gpus"].push_back({{"model", facts.model}, {"id", facts.id}});
  } catch (const std::exception& error) {
    told["error"] = error.what();
  }
  std::vector<int> first_ranks;
  for (int i = 0; i < process.count; ++i) first_ranks.push_back(i * here);
  Subgroup group(*hosts[0], first_ranks, Group::kProcesses);
  const Processes processes(group, options.timeout);
  const std::vector<std::string> texts = processes.to_first(told.dump());
  const std::string error = processes.from_first(processes.is_first() ? compare(texts) : "");
  if (!error.empty()) {
    group.flush(options.timeout);  // so that all know it
    fail(error);
  }
  NcclOptions nccl;
  nccl.timeout = nccl.connection_timeout = options.timeout;
  nccl.tensors = opened.devices.front().where().type();
  nccl.group_sums = sums_by_nccl(options);
  return make_nccl_world(hosts, opened.nccl, opened.devices, options.data_parallel, options.ranks,
                         options.rank_of_stage, nccl);
}

}  // namespace twobp
