#include "twobp/train/run_world.h"

#include "twobp/core/check.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/pipeline_shape.h"
#include "twobp/train/build_model.h"
#include "twobp/train/gpu_world.h"
#include "twobp/transport/mpi/mpi.h"
#include "twobp/transport/start.h"
#include "twobp/transport/store/store_connection.h"

namespace twobp {
namespace {

// Of one process. Each is a thread, and more would take minutes to start.
constexpr int64_t kMostRanks = 1024;

void check_count(const PipelineConfig& config, int processes) {
  const int ranks = pipeline_shape(config).ranks;
  const int64_t wanted = int64_t{ranks} * config.data_parallel;
  TWOBP_CHECK(processes == wanted, processes, processes == 1 ? " process was" : " processes were",
              " started, but pipeline.ranks ", ranks, " x pipeline.data_parallel ", config.data_parallel, " = ", wanted,
              ": start ", wanted, ", or change these keys");
}

std::shared_ptr<Transport> through_store(const PipelineConfig& config, const Launcher& launcher) {
  return make_store_transport(std::make_shared<StoreConnection>(store_place(launcher), config.timeout));
}

}  // namespace

TransportKind choose_transport(const PipelineConfig& config, const Launcher& launcher) {
  const bool torchrun = launcher.kind == Launcher::Kind::kTorchrun;
  const bool on_cpu = config.device == "cpu";
  const std::string& asked = config.transport;
  TransportKind kind = TransportKind::kThreads;
  if (asked == "mpi") kind = TransportKind::kMpi;
  if (asked == "nccl") kind = TransportKind::kNccl;
  if (asked == "auto" && launcher.started_many())
    kind = !on_cpu ? TransportKind::kNccl : torchrun ? TransportKind::kStore : TransportKind::kMpi;
  if (kind == TransportKind::kThreads) {
    TWOBP_CHECK(!launcher.started_many(), "pipeline.transport is \"threads\", but ", name_of(launcher.kind),
                " started ", launcher.size, " processes, and each would train alone: start one, or use \"auto\"");
    TWOBP_CHECK(config.sums != "nccl" || config.data_parallel == 1,
                "pipeline.sums is \"nccl\", but the replicas are threads of this process, which hand each "
                "other their tensors: set it to \"ordered\", or start a process for each rank");
    return kind;
  }
  TWOBP_CHECK(on_cpu || kind == TransportKind::kNccl, "pipeline.transport is \"mpi\", which carries what lies ",
              "in a CPU's memory, but pipeline.device is \"", config.device,
              "\": set the transport to \"auto\" or \"nccl\", or the device to \"cpu\"");
  TWOBP_CHECK(!on_cpu || kind != TransportKind::kNccl,
              "pipeline.transport is \"nccl\", which carries what lies "
              "in a GPU's memory, but pipeline.device is \"cpu\": set the transport to \"auto\", or the device "
              "to \"cuda\"");
  TWOBP_CHECK(launcher.started_many() || launcher.kind != Launcher::Kind::kNone ||
                  int64_t{pipeline_shape(config).ranks} * config.data_parallel == 1,
              "pipeline.transport is \"", asked, "\", but this process was started by itself: start ",
              int64_t{pipeline_shape(config).ranks} * config.data_parallel, " by ",
              asked == "mpi" ? "mpirun or srun" : "torchrun, srun or mpirun", ", or use \"threads\"");
  TWOBP_CHECK(kind != TransportKind::kMpi || !torchrun || !launcher.started_many(),
              "pipeline.transport is \"mpi\", but the processes were started by torchrun, which MPI does not "
              "know: use mpirun or srun");
  if (kind == TransportKind::kNccl) {
    TWOBP_CHECK(!config.graphs || !launcher.started_many(), "pipeline.graphs is set, but ", name_of(launcher.kind),
                " started ", launcher.size,
                " processes, and a graph has all ranks of a pipeline, so that they must be in one process: "
                "set it to false");
    ranks_of_process(config, pipeline_shape(config).ranks, launcher.size);
  } else {
    check_count(config, launcher.size);
  }
  return kind;
}

void check_alone(const char* command, const Launcher& launcher) {
  TWOBP_CHECK(!launcher.started_many(), "`twobp ", command, "` is for one process, but ", name_of(launcher.kind),
              " started ", launcher.size, ": start it without");
}

void run_world(const PipelineConfig& config, const Launcher& launcher, const std::function<void(World)>& program) {
  const int ranks = pipeline_shape(config).ranks;
  std::vector<World> worlds;
  switch (choose_transport(config, launcher)) {
    case TransportKind::kThreads: {
      const int64_t all = int64_t{ranks} * config.data_parallel;
      TWOBP_CHECK(all <= kMostRanks, "pipeline.ranks ", ranks, " x pipeline.data_parallel ", config.data_parallel,
                  " = ", all, " ranks, but one process has ", kMostRanks,
                  " at most: lower these keys, or start a process for each rank");
      ThreadOptions threads;
      threads.threads_per_rank = config.threads;
      worlds = make_thread_worlds(config.data_parallel, ranks, threads,
                                  Device::open_for(config.device, static_cast<int>(all), config.gpu_parts));
      break;
    }
    case TransportKind::kMpi:
      worlds.push_back(make_mpi_world(config.data_parallel, ranks));
      break;
    case TransportKind::kStore:
      worlds.push_back(make_process_world(through_store(config, launcher), config.data_parallel, ranks));
      break;
    case TransportKind::kNccl:
      worlds.push_back(make_gpu_world(config, launcher, ranks));
      break;
  }
  run_worlds(std::move(worlds), program);
}

void run_world(const PipelineConfig& config, const std::function<void(World)>& program) {
  run_world(config, find_launcher(), program);
}

}  // namespace twobp
