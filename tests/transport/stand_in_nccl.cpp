#include "tests/transport/stand_in_nccl.h"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <random>
#include <string>
#include <sys/mman.h>
#include <sys/resource.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "tests/nn/device/stand_in_device.h"

namespace twobp::test {
namespace {

constexpr int kInvalidUsage = 5;
constexpr off_t kDataBegin = 4096;  // in the file of a communicator
constexpr int kMostRanks = 16;      // of a communicator
enum Kind { kTransfer, kAllReduce, kReduce, kBroadcast, kKinds };
constexpr int kFirstWithCtas = 21700;
constexpr int kMostCtas = 32;  // of a communicator whose configuration has no limit

// What the ends of a communicator tell each other, by rank. It has no locks, because a process may be killed at any
// time.
struct Shared {
  std::atomic<bool> joined[kMostRanks], aborted[kMostRanks], finalized[kMostRanks];
  std::atomic<bool> began[kKinds][kMostRanks];  // a first call of each kind
  std::atomic<int> error{};
  // Of a transfer between two.
  std::atomic<int64_t> wanted{};  // bytes that the receiver waits for; 0: none
  std::atomic<int64_t> there{};   // bytes that were sent and not yet received
  // Of the calls of all: the last one, counted from 1, whose data a rank has written and read.
  std::atomic<int64_t> wrote[kMostRanks], read[kMostRanks];
  std::atomic<int64_t> bytes[kMostRanks];
};
static_assert(sizeof(Shared) <= kDataBegin && std::atomic<int64_t>::is_always_lock_free);

// A communicator: a file that all ends map, with the data under way behind what they share.
class Channel {
 public:
  Channel(const std::string& path, int ranks)
      : path_(path), ranks_(ranks), file_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)) {
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
  // Returns whether nobody had this rank before.
  bool join(int rank) {
    const bool first = !shared_->joined[rank].exchange(true);
    if (all([&](int r) { return shared_->joined[r].load(); })) ::unlink(path_.c_str());
    return first;
  }
  template <typename Holds>
  bool all(const Holds& holds) const {
    for (int rank = 0; rank < ranks_; ++rank) {
      if (!holds(rank)) return false;
    }
    return true;
  }
  int ranks() const { return ranks_; }
  bool write(const void* data, int64_t bytes, int64_t at = 0) const {
    return ::pwrite(file_, data, static_cast<size_t>(bytes), kDataBegin + at) == bytes;
  }
  bool read(void* data, int64_t bytes, int64_t at = 0) const {
    return ::pread(file_, data, static_cast<size_t>(bytes), kDataBegin + at) == bytes;
  }

  std::atomic<int> in_stream = 0, waiting = 0;  // sends and receives

 private:
  std::string path_;
  int ranks_;
  int file_;
  Shared* shared_ = nullptr;
};

struct Comm {
  std::shared_ptr<Channel> channel;
  int rank = 0;
  int64_t calls = 0;     // of all ends
  std::mutex polling{};  // guards what follows; a watching thread polls, too
  int polls_left = 0;    // that find the last send under way
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
  const std::lock_guard lock(mine.polling);
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
  const std::string name =
      "twobp_stand_in_" + std::to_string(random) + "_" + std::to_string(::getpid()) + "_" + std::to_string(++ids);
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
  if (ranks < 2 || ranks > kMostRanks || rank < 0 || rank >= ranks || ctas == 0) return kInvalidUsage;
  raise_to(stand_in_nccl_state().most_ctas, ctas);
  const auto channel = std::make_shared<Channel>(std::filesystem::temp_directory_path() / id.bytes, ranks);
  if (!channel->join(rank)) return kInvalidUsage;
  *comm = new Comm{channel, rank};
  ++stand_in_nccl_state().ends;
  return NcclApi::kInProgress;
}

int finalize(NcclComm comm) {
  const Comm& mine = comm_of(comm);
  stand_in_nccl_state().unmatched += mine.channel->in_stream + mine.channel->waiting;
  (*mine.channel)->finalized[mine.rank] = true;
  return NcclApi::kInProgress;
}

// If not all ends have been finalized, NCCL's own function may wait for a peer.
int destroy(NcclComm comm) {
  const std::unique_ptr<Comm> mine(&comm_of(comm));
  const Channel& channel = *mine->channel;
  if (!channel.all([&](int rank) { return channel->finalized[rank].load(); })) ++stand_in_nccl_state().waiting_ends;
  return 0;
}

int abort(NcclComm comm) {
  const std::unique_ptr<Comm> mine(&comm_of(comm));
  Channel& channel = *mine->channel;
  channel->aborted[mine->rank] = true;
  if (mine->rank == 0) channel->there = 0;
  return 0;
}

int get_async_error(NcclComm comm, int* error) {
  Comm& mine = comm_of(comm);
  const Channel& channel = *mine.channel;
  *error = channel->error != 0 ? channel->error.load() : stand_in_nccl_state().error.load();
  if (*error != 0) return 0;
  const bool others_are_there = channel.all([&](int rank) {
    for (const auto& began : channel->began) {
      if (began[mine.rank] && !began[rank]) return false;
    }
    return channel->joined[rank] && (channel->finalized[rank] || !channel->finalized[mine.rank]);
  });
  if (stand_in_nccl_state().stuck || !others_are_there || poll_send(mine)) *error = NcclApi::kInProgress;
  return 0;
}

int begin(const Comm& mine, Kind kind) {
  Channel& channel = *mine.channel;
  channel->began[kind][mine.rank] = true;
  const bool done =
      !stand_in_nccl_state().stuck && channel.all([&](int rank) { return channel->began[kind][rank].load(); });
  return done ? NcclApi::kSuccess : NcclApi::kInProgress;
}

// A kernel that sends holds its stream up until the receiver has the data, and the other way round. It reads the data
// when the receiver has begun to wait.
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
    --from.waiting;
    transfer_ends();
    if (from->aborted[1] || from->error != 0) return;
    if (!from.read(data, bytes)) from->error = kInvalidUsage;
    stand_in_nccl_state().bytes += bytes;
    from->there = 0;
  });
}

int send(const void* data, size_t count, int type, int peer, NcclComm comm, void* stream) {
  Comm& mine = comm_of(comm);
  if (mine.channel->ranks() != 2 || mine.rank != 0 || peer != 1 || type != NcclApi::kByte) return kInvalidUsage;
  raise_to(stand_in_nccl_state().most_in_stream, ++mine.channel->in_stream);
  put_send(mine.channel, reachable(data), static_cast<int64_t>(count), stream);
  const int result = begin(mine, kTransfer);
  const std::lock_guard lock(mine.polling);
  mine.polls_left = stand_in_nccl_state().polls_under_way;
  mine.poller = {};
  return mine.polls_left > 0 ? static_cast<int>(NcclApi::kInProgress) : result;
}

int receive(void* data, size_t count, int type, int peer, NcclComm comm, void* stream) {
  const Comm& mine = comm_of(comm);
  if (mine.channel->ranks() != 2 || mine.rank != 1 || peer != 0 || type != NcclApi::kByte) return kInvalidUsage;
  raise_to(stand_in_nccl_state().most_waiting, ++mine.channel->waiting);
  put_receive(mine.channel, reachable(data), static_cast<int64_t>(count), stream);
  return begin(mine, kTransfer);
}

std::optional<at::ScalarType> type_of(int type) {
  for (const auto candidate : {at::kLong, at::kHalf, at::kFloat, at::kDouble, at::kBFloat16}) {
    if (nccl_type(candidate) == type) return candidate;
  }
  return std::nullopt;
}

// The result of this thread's calls since group_start(), or nothing outside of a group.
thread_local std::optional<int> group_result;

int group_start() {
  group_result = NcclApi::kSuccess;
  return NcclApi::kSuccess;
}

// The calls' own result may be that they are under way.
int group_end() {
  const int result = group_result.value_or(kInvalidUsage);
  group_result.reset();
  return result;
}

// A call of all ends. Its kernel holds its stream up until all ends have begun. Then it gives this end's memory what
// `result` makes of all ends' data, by rank.
int together(Kind kind, NcclComm comm, const void* from, void* to, size_t count, int type, int operation, void* stream,
             const std::function<at::Tensor(const std::vector<at::Tensor>&)>& result) {
  Comm& mine = comm_of(comm);
  const auto dtype = type_of(type);
  if (from != to || operation != NcclApi::kSum || !dtype) return kInvalidUsage;
  ++stand_in_nccl_state().group_calls;
  const std::shared_ptr<Channel> channel = mine.channel;
  const int rank = mine.rank;
  const int64_t call = ++mine.calls;
  const auto bytes = static_cast<int64_t>(count * c10::elementSize(*dtype));
  void* const data = reachable(to);
  const auto given_up = [channel, rank] { return (*channel)->aborted[rank] || (*channel)->error != 0; };
  transfer_begins();
  hold(stream, [=] { return given_up() || channel->all([&](int r) { return (*channel)->read[r] >= call - 1; }); });
  put(stream, [=] {
    if (given_up()) return;
    if (!channel->write(data, bytes, rank * bytes)) (*channel)->error = kInvalidUsage;
    (*channel)->bytes[rank] = bytes;
    (*channel)->wrote[rank] = call;
  });
  hold(stream, [=] {
    return given_up() ||
           (!stand_in_nccl_state().loses_data && channel->all([&](int r) { return (*channel)->wrote[r] >= call; }));
  });
  put(stream, [=] {
    transfer_ends();
    if (given_up()) return;
    std::vector<at::Tensor> all;
    for (int r = 0; r < channel->ranks(); ++r) {
      all.push_back(at::empty({static_cast<int64_t>(count)}, at::TensorOptions(*dtype)));
      if ((*channel)->bytes[r] != bytes || !channel->read(all.back().mutable_data_ptr(), bytes, r * bytes))
        (*channel)->error = kInvalidUsage;
    }
    if ((*channel)->error != 0) return;
    const at::Tensor made = result(all);
    if (made.defined()) std::memcpy(data, made.const_data_ptr(), static_cast<size_t>(bytes));
    stand_in_nccl_state().bytes += bytes;
    (*channel)->read[rank] = call;
  });
  const int begun = begin(mine, kind);
  if (!group_result) return begun;
  if (begun != NcclApi::kSuccess) group_result = begun;
  return NcclApi::kSuccess;
}

// In the order of the ranks, as our own sums. NCCL's order is another one.
at::Tensor sum_of(const std::vector<at::Tensor>& all) {
  at::Tensor sum = all[0].clone();
  for (size_t r = 1; r < all.size(); ++r) sum.add_(all[r]);
  return sum;
}

int all_reduce(const void* from, void* to, size_t count, int type, int operation, NcclComm comm, void* stream) {
  return together(kAllReduce, comm, from, to, count, type, operation, stream, sum_of);
}

int reduce(const void* from, void* to, size_t count, int type, int operation, int root, NcclComm comm, void* stream) {
  const bool mine = comm_of(comm).rank == root;
  return together(kReduce, comm, from, to, count, type, operation, stream,
                  [mine](const std::vector<at::Tensor>& all) { return mine ? sum_of(all) : at::Tensor(); });
}

int broadcast(const void* from, void* to, size_t count, int type, int root, NcclComm comm, void* stream) {
  return together(kBroadcast, comm, from, to, count, type, NcclApi::kSum, stream,
                  [root](const std::vector<at::Tensor>& all) { return all[root]; });
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
  api.group_start = group_start;
  api.group_end = group_end;
  api.all_reduce = all_reduce;
  api.reduce = reduce;
  api.broadcast = broadcast;
  api.error_text = error_text;
  return api;
}

}  // namespace twobp::test
