#include "twobp/train/run_world.h"

#include "twobp/core/check.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/train/build_model.h"
#include "twobp/transport/mpi/mpi.h"
#include "twobp/transport/nccl/nccl.h"
#include "twobp/transport/store/store_transport.h"

namespace twobp {
namespace {

// Of one process. Each is a thread, and more would take minutes to start.
constexpr int64_t kMostRanks = 1024;

void check_count(const PipelineConfig& config, int processes) {
  const int ranks = pipeline_shape(config).ranks;
  const int64_t wanted = int64_t{ranks} * config.data_parallel;
  TWOBP_CHECK(processes == wanted, processes, processes == 1 ? " process was" : " processes were",
              " started, but pipeline.ranks ", ranks, " x pipeline.data_parallel ", config.data_parallel,
              " = ", wanted, ": start ", wanted, ", or change these keys");
}

// Processes that mpirun started connect through MPI, others at MASTER_ADDR.
World nccl_world(const PipelineConfig& config, const Launcher& launcher, int ranks) {
  Device device;
  try {
    device = Device::open("cuda", launcher.local_rank);
  } catch (const Error& error) {
    fail("pipeline.transport \"nccl\" needs GPUs, on CPUs start with mpirun: ", error.what());
  }
  const NcclApi api = load_nccl();
  NcclOptions options;
  options.timeout = options.connection_timeout = config.timeout;
  std::shared_ptr<Transport> host;
  if (launcher.kind == Launcher::Kind::kMpi && has_mpi()) {
    host = make_mpi_transport(launcher.size);
  } else {
    host = make_store_transport(std::make_shared<StoreConnection>(store_place(launcher), config.timeout));
  }
  return make_nccl_world(std::move(host), api, device, config.data_parallel, ranks, options);
}

}  // namespace

TransportKind choose_transport(const PipelineConfig& config, const Launcher& launcher) {
  const bool torchrun = launcher.kind == Launcher::Kind::kTorchrun;
  const std::string& asked = config.transport;
  TransportKind kind = TransportKind::kThreads;
  if (asked == "mpi" || (asked == "auto" && launcher.started_many() && !torchrun)) kind = TransportKind::kMpi;
  if (asked == "nccl" || (asked == "auto" && launcher.started_many() && torchrun))
    kind = TransportKind::kNccl;
  if (kind == TransportKind::kThreads) {
    TWOBP_CHECK(!launcher.started_many(), "pipeline.transport is \"threads\", but ", name_of(launcher.kind),
                " started ", launcher.size,
                " processes, and each would train alone: start one, or use \"auto\"");
    return kind;
  }
  TWOBP_CHECK(config.device == "cpu", "pipeline.device is \"", config.device,
              "\", which only supports ranks that are threads of one process so far: start one, with "
              "pipeline.transport \"auto\" or \"threads\", or set pipeline.device to \"cpu\"");
  TWOBP_CHECK(launcher.started_many() || launcher.kind != Launcher::Kind::kNone ||
                  int64_t{pipeline_shape(config).ranks} * config.data_parallel == 1,
              "pipeline.transport is \"", asked, "\", but this process was started by itself: start ",
              int64_t{pipeline_shape(config).ranks} * config.data_parallel, " by ",
              asked == "mpi" ? "mpirun or srun" : "torchrun, srun or mpirun", ", or use \"threads\"");
  TWOBP_CHECK(kind != TransportKind::kMpi || !torchrun || !launcher.started_many(),
              "pipeline.transport is \"mpi\", but the processes were started by torchrun, which MPI does not "
              "know: use mpirun or srun");
  check_count(config, launcher.size);
  return kind;
}

void check_alone(const char* command, const Launcher& launcher) {
  TWOBP_CHECK(!launcher.started_many(), "`twobp ", command, "` is for one process, but ",
              name_of(launcher.kind), " started ", launcher.size, ": start it without");
}

void run_world(const PipelineConfig& config, const Launcher& launcher,
               const std::function<void(World)>& program) {
  const int ranks = pipeline_shape(config).ranks;
  std::vector<World> worlds;
  switch (choose_transport(config, launcher)) {
    case TransportKind::kThreads: {
      const int64_t all = int64_t{ranks} * config.data_parallel;
      TWOBP_CHECK(all <= kMostRanks, "pipeline.ranks ", ranks, " x pipeline.data_parallel ",
                  config.data_parallel, " = ", all, " ranks, but one process has ", kMostRanks,
                  " at most: lower these keys, or start a process for each rank");
      ThreadOptions threads;
      threads.threads_per_rank = config.threads;
      worlds = make_thread_worlds(config.data_parallel, ranks, threads,
                                  Device::open_for(config.device, ranks, config.gpu_parts));
      break;
    }
    case TransportKind::kMpi:
      worlds.push_back(make_mpi_world(config.data_parallel, ranks));
      break;
    case TransportKind::kNccl:
      worlds.push_back(nccl_world(config, launcher, ranks));
      break;
  }
  run_worlds(std::move(worlds), program);
}

}  // namespace twobp
