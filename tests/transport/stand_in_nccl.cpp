#include "tests/transport/stand_in_nccl.h"

#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "tests/nn/device/stand_in_device.h"

namespace twobp::test {
namespace {

constexpr int kInvalidUsage = 5;

// This is a communicator of two ranks.
struct Channel {
  std::mutex mutex;
  bool joined[2] = {false, false};
  bool began[2] = {false, false};  // whether each end began a first transfer
  bool aborted[2] = {false, false};
  bool finalized[2] = {false, false};
  const void* data = nullptr;  // the data that is being sent
  size_t bytes = 0;
  bool there = false;
  int error = 0;
  int in_stream = 0;
};

struct Comm {
  std::shared_ptr<Channel> channel;
  int side = 0;
};

std::mutex channels_mutex;
std::map<int64_t, std::weak_ptr<Channel>> channels;
int64_t ids = 0;

Comm& comm_of(NcclComm comm) {
  return *static_cast<Comm*>(comm);
}

int get_version(int* version) {
  *version = 22705;
  return 0;
}

int get_unique_id(NcclUniqueId* id) {
  const std::lock_guard lock(channels_mutex);
  *id = {};
  ++ids;
  std::memcpy(id->bytes, &ids, sizeof(ids));
  return 0;
}

int init_rank(NcclComm* comm, int ranks, NcclUniqueId id, int rank, NcclConfig* config) {
  if (ranks != 2 || rank < 0 || rank > 1 || config->blocking != 0) return kInvalidUsage;
  int64_t number = 0;
  std::memcpy(&number, id.bytes, sizeof(number));
  const std::lock_guard lock(channels_mutex);
  std::shared_ptr<Channel> channel = channels[number].lock();
  if (!channel) channels[number] = channel = std::make_shared<Channel>();
  const std::lock_guard channel_lock(channel->mutex);
  if (channel->joined[rank]) return kInvalidUsage;
  channel->joined[rank] = true;
  *comm = new Comm{channel, rank};
  return NcclApi::kInProgress;
}

int finalize(NcclComm comm) {
  const Comm& mine = comm_of(comm);
  const std::lock_guard lock(mine.channel->mutex);
  mine.channel->finalized[mine.side] = true;
  return NcclApi::kInProgress;
}

// If both ends have not been finalized, NCCL's own function may wait for the peer.
int destroy(NcclComm comm) {
  const std::unique_ptr<Comm> mine(&comm_of(comm));
  const std::lock_guard lock(mine->channel->mutex);
  const auto& finalized = mine->channel->finalized;
  if (!finalized[0] || !finalized[1]) ++stand_in_nccl_state().waiting_ends;
  return 0;
}

int abort(NcclComm comm) {
  Comm& mine = comm_of(comm);
  {
    const std::lock_guard lock(mine.channel->mutex);
    mine.channel->aborted[mine.side] = true;
    if (mine.side == 0) mine.channel->there = false;
  }
  delete &mine;
  return 0;
}

int get_async_error(NcclComm comm, int* error) {
  const Comm& mine = comm_of(comm);
  Channel& channel = *mine.channel;
  const std::lock_guard lock(channel.mutex);
  *error = channel.error != 0 ? channel.error : stand_in_nccl_state().error.load();
  if (*error != 0) return 0;
  const int other = 1 - mine.side;
  if (stand_in_nccl_state().stuck || !channel.joined[other] ||
      (channel.began[mine.side] && !channel.began[other]) ||
      (channel.finalized[mine.side] && !channel.finalized[other]))
    *error = NcclApi::kInProgress;
  return 0;
}

int begin(const Comm& mine) {
  const std::lock_guard lock(mine.channel->mutex);
  mine.channel->began[mine.side] = true;
  const bool done = mine.channel->began[1 - mine.side] && !stand_in_nccl_state().stuck;
  return done ? NcclApi::kSuccess : NcclApi::kInProgress;
}

// A sending kernel blocks its stream until the receiver has the data. A receiving kernel blocks its stream
// until the data is there.
void put_send(const std::shared_ptr<Channel>& channel, const void* data, size_t bytes, void* stream) {
  put(stream, [channel, data, bytes] {
    const std::lock_guard lock(channel->mutex);
    channel->data = data;
    channel->bytes = bytes;
    channel->there = !channel->aborted[0];
  });
  hold(stream, [channel] {
    const std::lock_guard lock(channel->mutex);
    return !channel->there || channel->aborted[0];
  });
  put(stream, [channel] {
    const std::lock_guard lock(channel->mutex);
    --channel->in_stream;
  });
}

void put_receive(const std::shared_ptr<Channel>& channel, void* data, size_t bytes, void* stream) {
  hold(stream, [channel] {
    const std::lock_guard lock(channel->mutex);
    return (channel->there && !stand_in_nccl_state().loses_data) || channel->aborted[1];
  });
  put(stream, [channel, data, bytes] {
    const std::lock_guard lock(channel->mutex);
    if (channel->aborted[1]) return;
    if (channel->bytes != bytes) {
      channel->error = kInvalidUsage;
    } else {
      std::memcpy(data, channel->data, bytes);
      stand_in_nccl_state().bytes += static_cast<int64_t>(bytes);
    }
    channel->there = false;
  });
}

int send(const void* data, size_t count, int type, int peer, NcclComm comm, void* stream) {
  const Comm& mine = comm_of(comm);
  if (mine.side != 0 || peer != 1 || type != NcclApi::kByte) return kInvalidUsage;
  {
    const std::lock_guard lock(mine.channel->mutex);
    const int in_stream = ++mine.channel->in_stream;
    std::atomic<int>& most = stand_in_nccl_state().most_in_stream;
    for (int old = most; old < in_stream && !most.compare_exchange_weak(old, in_stream);) {
    }
  }
  put_send(mine.channel, reachable(data), count, stream);
  return begin(mine);
}

int receive(void* data, size_t count, int type, int peer, NcclComm comm, void* stream) {
  const Comm& mine = comm_of(comm);
  if (mine.side != 1 || peer != 0 || type != NcclApi::kByte) return kInvalidUsage;
  put_receive(mine.channel, reachable(data), count, stream);
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
