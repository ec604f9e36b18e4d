#include "twobp/transport/mpi/mpi.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mpi.h>
#include <mutex>
#include <sched.h>
#include <string_view>
#include <thread>
#include <unistd.h>

#include "twobp/core/check.h"
#include "twobp/transport/mpi/mpi_endpoint.h"
#include "twobp/transport/start.h"

namespace twobp {
namespace {

// Set when a rank has aborted. The others may be dead, and MPI_Finalize would wait for them.
std::atomic<bool> failed{false};

// If srun was not told to support it, Open MPI ends the process in MPI_Init, with advice on how to build Slurm.
void check_srun(const Launcher& launcher) {
#if defined(OPEN_MPI)
  if (launcher.kind != Launcher::Kind::kSlurm || !launcher.started_many()) return;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    if (std::string_view(*variable).starts_with("PMI")) return;  // PMIX_RANK, PMI_FD, ...
  }
  fail("srun started ", launcher.size,
       " processes that are not connected to each other: use srun --mpi=pmix, or another type that "
       "srun --mpi=list shows");
#endif
}

// MPI_Init waits without limit for ranks that never call it, and does not say which. After a while, each rank that
// waits says so. The others are those that have not come.
class WaitsForOthers {
 public:
  explicit WaitsForOthers(const Launcher& launcher)
      : thread_([this, launcher] {
          std::unique_lock lock(mutex_);
          if (changed_.wait_for(lock, kPatience, [this] { return over_; })) return;
          std::fprintf(stderr,
                       "rank %d of %d has waited %d s in MPI_Init: the ranks that do not say this have not started\n",
                       launcher.rank, launcher.size, static_cast<int>(kPatience.count()));
        }) {}
  ~WaitsForOthers() {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  WaitsForOthers(const WaitsForOthers&) = delete;
  WaitsForOthers& operator=(const WaitsForOthers&) = delete;

 private:
  static constexpr std::chrono::seconds kPatience{20};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
  std::thread thread_;  // last, because it uses the other members
};

class WatchedEndpoint : public MpiEndpoint {
 public:
  using MpiEndpoint::MpiEndpoint;
  ~WatchedEndpoint() override {
    if (aborted()) failed = true;
  }
};

// Holds MPI from its first use to the end of the program.
class Session {
 public:
  static Session& get() {
    static Session session;
    return session;
  }

  int size() const { return size_; }

  // Whether each process of this machine has a core of its own.
  bool own_cores() const { return own_cores_; }

 private:
  Session() {
    const Launcher launcher = find_launcher();
    check_srun(launcher);
    int initialized = 0;
    MPI_Initialized(&initialized);
    int provided = 0;
    if (initialized != 0) {
      MPI_Query_thread(&provided);
    } else {
      const WaitsForOthers watch(launcher);
      check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided), "start");
      finish_ = true;
    }
    TWOBP_CHECK(provided >= MPI_THREAD_SERIALIZED,
                "this MPI cannot be called from several threads in turn (MPI_THREAD_SERIALIZED): use an MPI "
                "that was built with support for threads");
    check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &size_), "tell the number of processes");
    TWOBP_CHECK(
        launcher.kind == Launcher::Kind::kNone || launcher.kind == Launcher::Kind::kTorchrun || launcher.size == size_,
        name_of(launcher.kind), " started ", launcher.size, " processes, but MPI sees ", size_,
        ": twobp was built with another MPI than the launcher's, or srun needs an option (srun --mpi=list)");
    own_cores_ = enough_cores();
  }

  ~Session() {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finish_ && finalized == 0 && !failed) MPI_Finalize();
  }

  // Collective. Launchers may bind each process to cores, so the cores of all processes together count.
  static bool enough_cores() {
    MPI_Comm machine = MPI_COMM_NULL;
    check_mpi(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine),
              "find the processes of this machine");
    int processes = 0;
    MPI_Comm_size(machine, &processes);
    cpu_set_t cores;
    CPU_ZERO(&cores);
    if (sched_getaffinity(0, sizeof(cores), &cores) != 0) CPU_ZERO(&cores);
    check_mpi(MPI_Allreduce(MPI_IN_PLACE, &cores, sizeof(cores), MPI_BYTE, MPI_BOR, machine),
              "count the cores of this machine");
    MPI_Comm_free(&machine);
    return CPU_COUNT(&cores) >= processes;
  }

  int size_ = 1;
  bool finish_ = false;
  bool own_cores_ = false;
};

}  // namespace

bool has_mpi() {
  return true;
}

int mpi_size() {
  return Session::get().size();
}

std::unique_ptr<Transport> make_mpi_transport(int ranks, const MpiOptions& options) {
  const Session& session = Session::get();
  TWOBP_CHECK(ranks >= 1 && ranks <= session.size(), "a transport of ", ranks, " ranks among ", session.size(),
              " processes");
  int process = 0;
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &process), "tell the rank");
  MPI_Comm own = MPI_COMM_NULL;
  check_mpi(MPI_Comm_split(MPI_COMM_WORLD, process < ranks ? 0 : MPI_UNDEFINED, process, &own), "make a communicator");
  if (own == MPI_COMM_NULL) return nullptr;
  return std::make_unique<WatchedEndpoint>(own, options, session.own_cores());
}

World make_mpi_world(int replicas, int ranks, const MpiOptions& options) {
  return make_process_world(make_mpi_transport(mpi_size(), options), replicas, ranks);
}

bool mpi_is_running() {
  int initialized = 0;
  int finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  return initialized != 0 && finalized == 0;
}

void end_all(int code) {
  if (mpi_is_running()) MPI_Abort(MPI_COMM_WORLD, code);
  std::_Exit(code);
}

}  // namespace twobp
