#include "tests/transport/stand_in_nccl.h"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <sys/mman.h>
#include <sys/resource.h>
#include <thread>
#include <unistd.h>

#include "tests/nn/device/stand_in_device.h"

namespace twobp::test {
namespace {

constexpr int kInvalidUsage = 5;
constexpr off_t kDataBegin = 4096;  // in the file of a communicator
constexpr int kFirstWithCtas = 21700;
constexpr int kMostCtas = 32;  // of a communicator whose configuration has no limit

// What the two ends of a communicator tell each other, by side. It has no locks, because a process may be
// killed at any time.
struct Shared {
  std::atomic<bool> joined[2], aborted[2], finalized[2];
  std::atomic<bool> began[2];     // a first transfer
  std::atomic<int64_t> wanted{};  // bytes that the receiver waits for; 0: none
  std::atomic<int64_t> there{};   // bytes that were sent and not yet received
  std::atomic<int> error{};
};
static_assert(sizeof(Shared) <= kDataBegin && std::atomic<int64_t>::is_always_lock_free);

// A communicator of two: a file that both ends map, with the data under way behind what they share.
class Channel {
 public:
  explicit Channel(const std::string& path)
      : path_(path), file_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)) {
    if (file_ < 0 || ::ftruncate(file_, kDataBegin) != 0) throw std::bad_alloc();
    void* memory = ::mmap(nullptr, kDataBegin, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    shared_ = static_cast<Shared*>(memory);  // zeros, as in a new one
  }
  ~Channel() {
    ::munmap(shared_, kDataBegin);
    ::close(file_);
  }
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  Shared* operator->() const { return shared_; }
  // Returns whether nobody had this side before.
  bool join(int side) {
    const bool first = !shared_->joined[side].exchange(true);
    if (shared_->joined[1 - side]) ::unlink(path_.c_str());
    return first;
  }
  bool write(const void* data, int64_t bytes) const {
    return ::pwrite(file_, data, static_cast<size_t>(bytes), kDataBegin) == bytes;
  }
  bool read(void* data, int64_t bytes) const {
    return ::pread(file_, data, static_cast<size_t>(bytes), kDataBegin) == bytes;
  }

  std::atomic<int> in_stream = 0;

 private:
  std::string path_;
  int file_;
  Shared* shared_ = nullptr;
};

struct Comm {
  std::shared_ptr<Channel> channel;
  int side = 0;
  int polls_left = 0;  // that find the last send under way
  std::thread::id poller = {};
  long sleeps = 0;  // of the poller, before its last poll
};

Comm& comm_of(NcclComm comm) {
  return *static_cast<Comm*>(comm);
}

void raise_to(std::atomic<int>& most, int value) {
  for (int old = most; old < value && !most.compare_exchange_weak(old, value);) {
  }
}

// How often this thread has given up its core of its own accord.
long sleeps() {
  rusage use{};
  ::getrusage(RUSAGE_THREAD, &use);
  return use.ru_nvcsw;
}

// Whether the poll finds a send under way.
bool poll_send(Comm& mine) {
  if (mine.polls_left == 0) return false;
  --mine.polls_left;
  const std::thread::id here = std::this_thread::get_id();
  const long now = sleeps();
  if (mine.poller == here && mine.sleeps == now) ++stand_in_nccl_state().polls_in_a_row;
  mine.poller = here;
  mine.sleeps = now;
  return true;
}

int get_version(int* version) {
  *version = stand_in_nccl_state().version;
  return 0;
}

int get_unique_id(NcclUniqueId* id) {
  static std::atomic<int> ids = 0;
  static const unsigned random = std::random_device()();
  *id = {};
  const std::string name = "twobp_stand_in_" + std::to_string(random) + "_" + std::to_string(::getpid()) +
                           "_" + std::to_string(++ids);
  std::memcpy(id->bytes, name.c_str(), name.size() + 1);
  return 0;
}

// The most CTAs of a communicator. NCCL reads a configuration in this way. 0: it refuses the configuration.
int ctas_of(const NcclConfig& given) {
  const int version = stand_in_nccl_state().version;
  NcclConfig config;
  const size_t known = version < kFirstWithCtas ? offsetof(NcclConfig, cga_cluster_size) : sizeof(config);
  std::memcpy(&config, &given, std::min(given.size, known));
  if (config.magic != 0xcafebeef || config.blocking != 0) return 0;
  if (config.version < kFirstWithCtas || config.max_ctas == NcclConfig::kUndefined) return kMostCtas;
  return 0 < config.min_ctas && config.min_ctas <= config.max_ctas ? config.max_ctas : 0;
}

int init_rank(NcclComm* comm, int ranks, NcclUniqueId id, int rank, NcclConfig* config) {
  const int ctas = ctas_of(*config);
  if (ranks != 2 || rank < 0 || rank > 1 || ctas == 0) return kInvalidUsage;
  raise_to(stand_in_nccl_state().most_ctas, ctas);
  const auto channel = std::make_shared<Channel>(std::filesystem::temp_directory_path() / id.bytes);
  if (!channel->join(rank)) return kInvalidUsage;
  *comm = new Comm{channel, rank};
  ++stand_in_nccl_state().ends;
  return NcclApi::kInProgress;
}

int finalize(NcclComm comm) {
  const Comm& mine = comm_of(comm);
  (*mine.channel)->finalized[mine.side] = true;
  return NcclApi::kInProgress;
}

// If both ends have not been finalized, NCCL's own function may wait for the peer.
int destroy(NcclComm comm) {
  const std::unique_ptr<Comm> mine(&comm_of(comm));
  const Channel& channel = *mine->channel;
  if (!channel->finalized[0] || !channel->finalized[1]) ++stand_in_nccl_state().waiting_ends;
  return 0;
}

int abort(NcclComm comm) {
  const std::unique_ptr<Comm> mine(&comm_of(comm));
  Channel& channel = *mine->channel;
  channel->aborted[mine->side] = true;
  if (mine->side == 0) channel->there = 0;
  return 0;
}

int get_async_error(NcclComm comm, int* error) {
  Comm& mine = comm_of(comm);
  const Channel& channel = *mine.channel;
  *error = channel->error != 0 ? channel->error.load() : stand_in_nccl_state().error.load();
  if (*error != 0) return 0;
  const int other = 1 - mine.side;
  if (stand_in_nccl_state().stuck || !channel->joined[other] ||
      (channel->began[mine.side] && !channel->began[other]) ||
      (channel->finalized[mine.side] && !channel->finalized[other]) || poll_send(mine))
    *error = NcclApi::kInProgress;
  return 0;
}

int begin(const Comm& mine) {
  Channel& channel = *mine.channel;
  channel->began[mine.side] = true;
  const bool done = channel->began[1 - mine.side] && !stand_in_nccl_state().stuck;
  return done ? NcclApi::kSuccess : NcclApi::kInProgress;
}

// A kernel that sends holds its stream up until the receiver has the data, and the other way round. It reads
// the data when the receiver has begun to wait.
void put_send(const std::shared_ptr<Channel>& channel, const void* data, int64_t bytes, void* stream) {
  transfer_begins();
  hold(stream, [channel] { return (*channel)->wanted != 0 || (*channel)->aborted[0]; });
  put(stream, [channel, data, bytes] {
    Channel& to = *channel;
    if (to->aborted[0]) return;
    if (to->wanted != bytes || !to.write(data, bytes)) {
      to->error = kInvalidUsage;
      return;
    }
    to->wanted = 0;
    to->there = bytes;
  });
  hold(stream, [channel] { return (*channel)->there == 0 || (*channel)->aborted[0]; });
  put(stream, [channel] {
    --channel->in_stream;
    transfer_ends();
  });
}

void put_receive(const std::shared_ptr<Channel>& channel, void* data, int64_t bytes, void* stream) {
  transfer_begins();
  put(stream, [channel, bytes] { (*channel)->wanted = bytes; });
  hold(stream, [channel] {
    const Channel& from = *channel;
    return (from->there != 0 && !stand_in_nccl_state().loses_data) || from->error != 0 || from->aborted[1];
  });
  put(stream, [channel, data, bytes] {
    Channel& from = *channel;
    transfer_ends();
    if (from->aborted[1] || from->error != 0) return;
    if (!from.read(data, bytes)) from->error = kInvalidUsage;
    stand_in_nccl_state().bytes += bytes;
    from->there = 0;
  });
}

int send(const void* data, size_t count, int type, int peer, NcclComm comm, void* stream) {
  Comm& mine = comm_of(comm);
  if (mine.side != 0 || peer != 1 || type != NcclApi::kByte) return kInvalidUsage;
  raise_to(stand_in_nccl_state().most_in_stream, ++mine.channel->in_stream);
  put_send(mine.channel, reachable(data), static_cast<int64_t>(count), stream);
  mine.polls_left = stand_in_nccl_state().polls_under_way;
  mine.poller = {};
  const int result = begin(mine);
  return mine.polls_left > 0 ? static_cast<int>(NcclApi::kInProgress) : result;
}

int receive(void* data, size_t count, int type, int peer, NcclComm comm, void* stream) {
  const Comm& mine = comm_of(comm);
  if (mine.side != 1 || peer != 0 || type != NcclApi::kByte) return kInvalidUsage;
  put_receive(mine.channel, reachable(data), static_cast<int64_t>(count), stream);
  return begin(mine);
}

const char* error_text(int error) {
  return error == kInvalidUsage ? "invalid usage" : error == 6 ? "remote process exited" : "some error";
}

}  // namespace

StandInNccl& stand_in_nccl_state() {
  static StandInNccl state;
  return state;
}

NcclApi stand_in_nccl() {
  NcclApi api;
  api.get_version = get_version;
  api.get_unique_id = get_unique_id;
  api.init_rank = init_rank;
  api.finalize = finalize;
  api.destroy = destroy;
  api.abort = abort;
  api.get_async_error = get_async_error;
  api.send = send;
  api.receive = receive;
  api.error_text = error_text;
  return api;
}

}  // namespace twobp::test
