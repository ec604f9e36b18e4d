#include "twobp/transport/start.h"

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <future>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/transport/mpi/mpi.h"
#include "twobp/transport/store/store_connection.h"
#include "twobp/transport/subgroup.h"

namespace twobp {
namespace {

constexpr int kMostProcesses = 1 << 24;
constexpr int kMostPort = 65535;

// The variables of one launcher. `local_rank` may be null.
struct Names {
  Launcher::Kind kind;
  const char* rank;
  const char* size;
  const char* local_rank;
};

constexpr Names kOpenMpi = {Launcher::Kind::kMpi, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                            "OMPI_COMM_WORLD_LOCAL_RANK"};
constexpr Names kMvapich = {Launcher::Kind::kMpi, "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
                            "MV2_COMM_WORLD_LOCAL_RANK"};
constexpr Names kPmi = {Launcher::Kind::kMpi, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"};
constexpr Names kTorchrun = {Launcher::Kind::kTorchrun, "RANK", "WORLD_SIZE", "LOCAL_RANK"};
constexpr Names kSlurm = {Launcher::Kind::kSlurm, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"};

// Parses a whole number in [least, most].
int read_number(const char* name, const char* text, int least, int most) {
  int value = 0;
  const char* end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, value);
  TWOBP_CHECK(error == std::errc{} && stop == end && text != end && value >= least && value <= most,
              "environment variable ", name, " is '", text, "', expected a whole number from ", least, " to ", most,
              ": it is set by the launcher; unset it or start the program with mpirun, srun or torchrun");
  return value;
}

int read_number(const Environment& environment, const char* name, const Names& names, int least, int most) {
  const char* text = environment(name);
  const char* other = name == names.rank ? names.size : names.rank;
  TWOBP_CHECK(text != nullptr, "environment variable ", other, " is set but ", name,
              " is not: launchers set both; unset it or start the program with mpirun, srun or torchrun");
  return read_number(name, text, least, most);
}

bool is_set(const Environment& environment, const Names& names) {
  return environment(names.rank) != nullptr || environment(names.size) != nullptr;
}

const Names* choose(const Environment& environment) {
  // Only torchrun sets this. Workers that it starts under srun or mpirun also have the variables of those.
  if (environment("TORCHELASTIC_RUN_ID") != nullptr) return &kTorchrun;
  for (const Names* names : {&kOpenMpi, &kMvapich, &kPmi, &kTorchrun}) {
    if (is_set(environment, *names)) return names;
  }
  // A batch script has SLURM_PROCID, although it is not a step.
  if (environment(kSlurm.rank) != nullptr && environment(kSlurm.size) != nullptr) return &kSlurm;
  return nullptr;
}

}  // namespace

const char* name_of(Launcher::Kind kind) {
  switch (kind) {
    case Launcher::Kind::kMpi:
      return "mpirun";
    case Launcher::Kind::kSlurm:
      return "srun";
    case Launcher::Kind::kTorchrun:
      return "torchrun";
    case Launcher::Kind::kNone:
      break;
  }
  return "no launcher";
}

Launcher find_launcher(const Environment& environment) {
  Launcher launcher;
  if (const Names* names = choose(environment)) {
    launcher.kind = names->kind;
    launcher.size = read_number(environment, names->size, *names, 1, kMostProcesses);
    launcher.rank = read_number(environment, names->rank, *names, 0, kMostProcesses);
    TWOBP_CHECK(launcher.rank < launcher.size, "environment variables ", names->rank, " and ", names->size,
                " say that this is process ", launcher.rank, " of ", launcher.size,
                ": they are set by the launcher; start the program with one launcher only");
    const char* local = environment(names->local_rank);
    const char* local_name = names->local_rank;
    if (local == nullptr) local = environment(local_name = kSlurm.local_rank);  // srun through PMI
    launcher.local_rank = local != nullptr ? read_number(local_name, local, 0, launcher.size - 1) : launcher.rank;
  }
  if (const char* address = environment("MASTER_ADDR")) launcher.master_address = address;
  if (const char* port = environment("MASTER_PORT")) {
    launcher.master_port = read_number("MASTER_PORT", port, 1, kMostPort);
  }
  return launcher;
}

Launcher find_launcher() {
  return find_launcher([](const char* name) { return std::getenv(name); });
}

void check_processes(int processes, int replicas, int ranks) {
  TWOBP_CHECK(replicas >= 1 && ranks >= 1, "a run needs at least one replica and one rank, got ", replicas,
              " replicas of ", ranks, " ranks");
  TWOBP_CHECK(processes == replicas * ranks, "the configuration makes ", replicas, " x ", ranks, " = ",
              replicas * ranks, " ranks (pipeline.data_parallel x ranks of a pipeline), but ", processes,
              processes == 1 ? " process was" : " processes were", " started: start ", replicas * ranks, " (mpirun -n ",
              replicas * ranks, ") or change the configuration");
}

namespace {

// Runs body(i) for each i < count at once. Rethrows the first error that is not an abort.
void at_once(int count, const std::function<void(int)>& body) {
  std::vector<std::future<void>> others;
  for (int i = 1; i < count; ++i) others.push_back(std::async(std::launch::async, body, i));
  std::exception_ptr error, aborted;
  const auto wait = [&](const auto& one) {
    try {
      one();
    } catch (const Aborted&) {
      if (!aborted) aborted = std::current_exception();
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  };
  wait([&] { body(0); });
  for (auto& other : others) wait([&] { other.get(); });
  if (error) std::rethrow_exception(error);
  if (aborted) std::rethrow_exception(aborted);
}

}  // namespace

Ends::Ends(int count, const std::function<std::shared_ptr<Transport>(int)>& make) : ends_(count) {
  try {
    at_once(count, [&](int i) { ends_[i] = make(i); });
  } catch (...) {
    at_once(size(), [&](int i) { ends_[i].reset(); });
    throw;
  }
}

Ends::~Ends() {
  at_once(size(), [&](int i) { ends_[i].reset(); });
}

World make_process_world(std::shared_ptr<Ends> ends, int replicas, int ranks) {
  Transport& front = *(*ends)[0];
  check_processes(front.size(), replicas, ranks);
  World world;
  world.replicas = replicas;
  world.ranks = ranks;
  world.replica = front.rank() / ranks;
  world.all_local = ranks == 1;
  for (int i = 0; i < ends->size(); ++i) world.add_rank(*(*ends)[i]);
  std::vector<int> processes;
  for (int rank = 0; rank < replicas * ranks; rank += ends->size()) processes.push_back(rank);
  world.processes = std::make_unique<Subgroup>(front, processes, Group::kProcesses);
  // The copy outlives a world that an exception destroyed, because the other processes must still learn of the error.
  world.abort = [ends](const std::string& reason) {
    for (int i = 0; i < ends->size(); ++i) (*ends)[i]->abort(reason);
    const int own = (*ends)[0]->rank();
    const auto first = (*ends)[0]->first_failure();
    const bool here = !first || (first->rank >= own && first->rank < own + ends->size());
    return here ? std::string() : concat("rank ", own, " stopped: ", first->reason);
  };
  world.holds.push_back(std::move(ends));
  return world;
}

World make_process_world(std::shared_ptr<Transport> end, int replicas, int ranks) {
  return make_process_world(std::make_shared<Ends>(1, [&](int) { return std::move(end); }), replicas, ranks);
}

namespace {

// Of one process. Each is a thread, and more would take minutes to start.
constexpr int64_t kMostRanks = 1024;

void check_count(const StartOptions& options, int processes) {
  const int ranks = options.ranks;
  const int64_t wanted = int64_t{ranks} * options.data_parallel;
  TWOBP_CHECK(processes == wanted, processes, processes == 1 ? " process was" : " processes were",
              " started, but pipeline.ranks ", ranks, " x pipeline.data_parallel ", options.data_parallel, " = ",
              wanted, ": start ", wanted, ", or change these keys");
}

std::shared_ptr<Transport> through_store(const StartOptions& options, const Launcher& launcher) {
  return make_store_transport(std::make_shared<StoreConnection>(store_place(launcher), options.timeout));
}

}  // namespace

bool sums_by_nccl(const StartOptions& options) {
  constexpr int kMostOrdered = 2;  // replicas, if nothing is asked for
  return options.sums == "nccl" || (options.sums == "auto" && options.data_parallel > kMostOrdered);
}

TransportKind choose_transport(const StartOptions& options, const Launcher& launcher) {
  const bool torchrun = launcher.kind == Launcher::Kind::kTorchrun;
  const bool on_cpu = options.device == "cpu";
  const std::string& asked = options.transport;
  TransportKind kind = TransportKind::kThreads;
  if (asked == "mpi") kind = TransportKind::kMpi;
  if (asked == "nccl") kind = TransportKind::kNccl;
  if (asked == "auto" && launcher.started_many())
    kind = !on_cpu ? TransportKind::kNccl : torchrun ? TransportKind::kStore : TransportKind::kMpi;
  if (kind == TransportKind::kThreads) {
    TWOBP_CHECK(!launcher.started_many(), "pipeline.transport is \"threads\", but ", name_of(launcher.kind),
                " started ", launcher.size, " processes, and each would train alone: start one, or use \"auto\"");
    TWOBP_CHECK(options.sums != "nccl" || options.data_parallel == 1,
                "pipeline.sums is \"nccl\", but the replicas are threads of this process, which hand each "
                "other their tensors: set it to \"auto\", or start a process for each rank");
    return kind;
  }
  TWOBP_CHECK(on_cpu || kind == TransportKind::kNccl, "pipeline.transport is \"mpi\", which carries what lies ",
              "in a CPU's memory, but pipeline.device is \"", options.device,
              "\": set the transport to \"auto\" or \"nccl\", or the device to \"cpu\"");
  TWOBP_CHECK(!on_cpu || kind != TransportKind::kNccl,
              "pipeline.transport is \"nccl\", which carries what lies "
              "in a GPU's memory, but pipeline.device is \"cpu\": set the transport to \"auto\", or the device "
              "to \"cuda\"");
  TWOBP_CHECK(launcher.started_many() || launcher.kind != Launcher::Kind::kNone ||
                  int64_t{options.ranks} * options.data_parallel == 1,
              "pipeline.transport is \"", asked, "\", but this process was started by itself: start ",
              int64_t{options.ranks} * options.data_parallel, " by ",
              asked == "mpi" ? "mpirun or srun" : "torchrun, srun or mpirun", ", or use \"threads\"");
  TWOBP_CHECK(kind != TransportKind::kMpi || !torchrun || !launcher.started_many(),
              "pipeline.transport is \"mpi\", but the processes were started by torchrun, which MPI does not "
              "know: use mpirun or srun");
  if (kind == TransportKind::kNccl) {
    constexpr int kMostReplicas = 8;
    TWOBP_CHECK(options.sums != "ordered" || options.data_parallel <= kMostReplicas,
                "pipeline.sums is \"ordered\", which needs two communicators of NCCL between each rank and each of ",
                options.data_parallel - 1, " other replicas, too many beyond ", kMostReplicas,
                " replicas: set it to \"auto\"");
    TWOBP_CHECK(!options.graphs || !launcher.started_many(), "pipeline.graphs is set, but ", name_of(launcher.kind),
                " started ", launcher.size,
                " processes, and a graph has all ranks of a pipeline, so that they must be in one process: "
                "set it to false");
    ranks_of_process(options, launcher.size);
  } else {
    check_count(options, launcher.size);
  }
  return kind;
}

void check_alone(const char* command, const Launcher& launcher) {
  TWOBP_CHECK(!launcher.started_many(), "`twobp ", command, "` is for one process, but ", name_of(launcher.kind),
              " started ", launcher.size, ": start it without");
}

void run_world(const StartOptions& options, const Launcher& launcher, const std::function<void(World)>& program) {
  const int ranks = options.ranks;
  std::vector<World> worlds;
  switch (choose_transport(options, launcher)) {
    case TransportKind::kThreads: {
      const int64_t all = int64_t{ranks} * options.data_parallel;
      TWOBP_CHECK(all <= kMostRanks, "pipeline.ranks ", ranks, " x pipeline.data_parallel ", options.data_parallel,
                  " = ", all, " ranks, but one process has ", kMostRanks,
                  " at most: lower these keys, or start a process for each rank");
      worlds = make_in_process_worlds(options.data_parallel, ranks, options.spin_seconds,
                                      Device::open_for(options.device, static_cast<int>(all), options.gpu_parts));
      break;
    }
    case TransportKind::kMpi:
      worlds.push_back(make_mpi_world(options.data_parallel, ranks));
      break;
    case TransportKind::kStore:
      worlds.push_back(make_process_world(through_store(options, launcher), options.data_parallel, ranks));
      break;
    case TransportKind::kNccl:
      worlds.push_back(make_gpu_world(options, launcher));
      break;
  }
  run_worlds(std::move(worlds), program);
}

}  // namespace twobp
