#include "twobp/transport/nccl/nccl.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <thread>
#include <tuple>
#include <type_traits>

#include <c10/util/ThreadLocalDebugInfo.h>

#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/transport/collectives.h"
#include "twobp/transport/message.h"
#include "twobp/transport/nccl/nccl_communicator.h"
#include "twobp/transport/nccl/nccl_link.h"
#include "twobp/transport/threads/in_process.h"

namespace twobp {
namespace {

constexpr size_t kUnderWay = 8;           // sends of a link with a head
constexpr size_t kExpectedUnderWay = 32;  // any sends of a link
constexpr size_t kReceivesUnderWay = 2;   // receives of a link that the rank may use before they are done
constexpr double kWatchSeconds = 0.1;
constexpr double kPushSeconds = 1e-3;  // the same while messages wait for their tensors
constexpr double kLockSeconds = 2;     // seconds; an NCCL call that holds the lock for longer is stuck
constexpr double kFlushSeconds = 2;    // for the last messages

// Tag for the host transport, which has no other messages. Messages with tensors that go by a link are numbered apart.
Tag head_tag(int64_t number, bool by_link) {
  return {.step = number, .micro_batch = by_link ? 1 : 0};
}
Tag id_tag() {
  return {.stage = 1};
}
Tag group_id_tag() {
  return {.stage = 2};
}

at::Tensor bytes_of(const NcclUniqueId& id) {
  at::Tensor bytes = at::empty({static_cast<int64_t>(sizeof(id))}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), &id, sizeof(id));
  return bytes;
}

class NcclTransport : public Transport {
 public:
  NcclTransport(std::shared_ptr<Transport> host, const NcclApi& api, const Device& device, const NcclLinks& links,
                const std::vector<int>& members, const NcclOptions& options)
      : host_(std::move(host)),
        api_(api),
        device_(device),
        options_(options),
        peers_(host_->size()),
        sums_(*this, members) {
    try {
      connect_links(links);
      if (!members.empty()) connect_group(members);
    } catch (const std::exception& error) {
      host_->abort(error.what());
      abort_all();
      const auto first = host_->first_failure();
      if (first && first->rank != rank()) throw Aborted(concat("rank ", rank(), " stopped: ", first->reason));
      throw;
    }
    watch_ = std::thread([this] { watch(); });
  }

  ~NcclTransport() override {
    try {
      if (!aborted_) flush(kFlushSeconds);
    } catch (const std::exception&) {
      // The message is no longer needed.
    }
    {
      const std::lock_guard lock(stop_mutex_);
      stop_ = true;
    }
    stopped_.notify_all();
    watch_.join();
    aborted_ ? abort_all() : finalize();
  }

  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }

  void isend(int to, const Tag& tag, Values values) override {
    check_receiver(to);
    throw_if_aborted();
    if (to == rank()) {
      mailbox_.put({to, tag, std::move(values), device_.current().record()});
      return;
    }
    queue(to, tag, pack_head(tag, std::move(values), options_.tensors, peers_[to].send != nullptr));
  }

  bool expect(int from, const Tag& tag, const Forms& forms) override {
    check_sender(from);
    Peer& peer = peers_[from];
    if (!peer.receive) return false;
    throw_if_aborted();
    const std::lock_guard lock(calls_);
    if (std::ranges::find(peer.due, tag, &Due::tag) != peer.due.end()) return true;
    if (mailbox_.has(from, tag)) {
      TWOBP_CHECK(forms.empty(), described_but_expected(from, tag));
      return true;
    }
    const OnStream link(peer.receive->stream());  // the memory belongs to this stream
    Due due{.tag = tag};
    for (const Form& form : forms) {
      const auto options = at::TensorOptions(form.type).device(place());
      due.values.push_back(at::empty_strided(form.sizes, form.strides, options));
    }
    peer.due.push_back(std::move(due));
    return true;
  }

  void isend_expected(int to, const Tag& tag, Values values) override {
    check_receiver(to);
    if (to == rank() || !peers_[to].send) return isend(to, tag, std::move(values));
    throw_if_aborted();
    values = dense(std::move(values));
    for (const at::Tensor& value : values) {
      TWOBP_CHECK(value.device().type() == options_.tensors, "rank ", rank(), " sends ", to_string(tag), " from ",
                  value.device().str(), ", but rank ", to, " expects it from a GPU");
    }
    queue(to, tag, {{}, std::move(values)});
  }

  bool try_receive(int from, const Tag& tag, Values& values) override {
    check_sender(from);
    throw_if_aborted();
    const std::lock_guard lock(calls_);
    Message message;
    if (!mailbox_.take(from, tag, message)) {
      pull(from, &tag);
      push(from);
      if (!mailbox_.take(from, tag, message) && !take_due(from, tag, message)) return false;
    }
    values = hand_over(std::move(message));
    return true;
  }

  Values receive(int from, const Tag& tag, double timeout) override {
    const double begin = awake_seconds();
    Values values;
    while (!try_receive(from, tag, values)) {
      progress();
      const double now = awake_seconds();
      if (now >= begin + timeout) {
        fail_waiting(rank(), timeout, tag, from);
      }
      if (now > begin + kNcclSpinSeconds) std::this_thread::sleep_for(kNcclPause);
    }
    return values;
  }

  void progress() override {
    throw_if_aborted();
    const std::lock_guard lock(calls_);
    for (const int peer : linked_) {
      pull(peer);
      push(peer);
    }
  }

  std::optional<int> unsent_to() override {
    progress();
    for (int to = 0; to < size(); ++to) {
      if (!all_sent(to)) return to;
    }
    return host_->unsent_to();
  }

  void abort(const std::string& reason) override {
    note_abort(concat("rank ", rank(), " stopped: ", reason));
    host_->abort(reason);
  }

  std::optional<Failure> first_failure() const override { return host_->first_failure(); }

  GroupSums* sums_of(const std::vector<int>& ranks) override {
    return group_ && ranks == sums_.members() ? &sums_ : nullptr;
  }

 private:
  // Sums of the ranks of `group_`.
  class Sums : public GroupSums {
   public:
    Sums(NcclTransport& owner, std::vector<int> members) : owner_(owner), members_(std::move(members)) {}
    const std::vector<int>& members() const { return members_; }

    bool takes(const at::Tensor& tensor) const override {
      return tensor.device().type() == owner_.options_.tensors && nccl_type(tensor.scalar_type());
    }
    DeviceEvent all_reduce(const at::Tensor& tensor) override {
      return launch([&](NcclGroup& group, const DeviceEvent& ready) { return group.all_reduce(tensor, ready); });
    }
    DeviceEvent reduce(const std::vector<at::Tensor>& tensors, const std::vector<int>& owners) override {
      return launch([&](NcclGroup& group, const DeviceEvent& ready) { return group.reduce(tensors, owners, ready); });
    }
    DeviceEvent broadcast(const std::vector<at::Tensor>& tensors, const std::vector<int>& roots) override {
      return launch([&](NcclGroup& group, const DeviceEvent& ready) { return group.broadcast(tensors, roots, ready); });
    }
    bool passed(const DeviceEvent& done) override {
      const bool passed = done.passed();
      owner_.throw_if_aborted();  // after the look: an abort ends the operation, too
      if (!passed) return false;
      owner_.in_nccl([&] { return owner_.group_->under_way(); });  // frees what is done
      return true;
    }
    void wait(const DeviceEvent& done, double timeout) override {
      const double begin = awake_seconds();
      while (!passed(done)) {
        owner_.progress();
        const double now = awake_seconds();
        if (now >= begin + timeout) fail_summing(owner_.rank(), timeout, members_);
        if (now > begin + kNcclSpinSeconds) std::this_thread::sleep_for(kNcclPause);
      }
    }

   private:
    template <typename Call>
    DeviceEvent launch(const Call& call) {
      owner_.throw_if_aborted();
      const DeviceEvent ready = owner_.device_.current().record();
      return owner_.in_nccl([&] { return call(*owner_.group_, ready); });
    }

    NcclTransport& owner_;
    std::vector<int> members_;
  };

  struct Outgoing {
    PackedHead message;  // without a head: the message is expected
    Tag tag;
    DeviceEvent ready;  // passes when the tensors have their contents
  };
  // A message that the rank has announced, in the order in which they come. Without values, it has a head.
  struct Due {
    Tag tag;
    Values values{};
    bool launched = false;
    DeviceEvent done{};
  };
  // A receive that was launched without a head.
  struct Launched {
    int64_t number;
    Tag tag;
    DeviceEvent done;
  };
  struct Peer {
    std::unique_ptr<NcclLink> send, receive;
    int64_t sent = 0, received = 0;  // numbers of messages by the link, with and without a head
    int64_t sent_by_host = 0, received_by_host = 0;
    std::deque<Outgoing> queued;
    std::deque<Due> due;
    std::deque<Launched> launched;
  };

  void connect_links(const NcclLinks& links) {
    const double deadline = awake_seconds() + options_.connection_timeout;
    NcclLinks mine = links;
    std::erase_if(mine, [&](const auto& link) {
      return (link.first != rank() && link.second != rank()) || link.first == link.second;
    });
    // All ranks use one order, so that no two wait for each other. In this one, every second pair of neighbours comes
    // first, and these connect at the same time.
    std::sort(mine.begin(), mine.end(), [](const auto& a, const auto& b) {
      const auto key = [](const auto& link) {
        return std::tuple(std::min(link.first, link.second) % 2, link.first, link.second);
      };
      return key(a) < key(b);
    });
    mine.erase(std::unique(mine.begin(), mine.end()), mine.end());
    std::map<std::pair<int, int>, NcclUniqueId> ids;
    for (const auto& link : mine) {
      if (link.first != rank()) continue;
      ids[link] = new_id();
      host_->isend(link.second, id_tag(), {bytes_of(ids[link])});
    }
    for (const auto& link : mine) {
      const bool sender = link.first == rank();
      if (!sender) ids[link] = receive_id(link.first, id_tag(), deadline);
      Peer& peer = peers_[sender ? link.second : link.first];
      auto& end = sender ? peer.send : peer.receive;
      end = std::make_unique<NcclLink>(api_, device_.make_stream(true), ids[link], sender,
                                       concat("rank ", link.first, " to rank ", link.second));
      connect(*end, deadline);
    }
    for (int peer = 0; peer < size(); ++peer) {
      if (peers_[peer].send || peers_[peer].receive) linked_.push_back(peer);
    }
  }

  // After the links of all ranks, which wait for no group.
  void connect_group(const std::vector<int>& members) {
    const double deadline = awake_seconds() + options_.connection_timeout;
    const auto here = std::find(members.begin(), members.end(), rank());
    TWOBP_CHECK(here != members.end(), "rank ", rank(), " is not one of the ranks that it sums with");
    NcclUniqueId id;
    if (here == members.begin()) {
      id = new_id();
      for (const int member : members) {
        if (member != rank()) host_->isend(member, group_id_tag(), {bytes_of(id)});
      }
    } else {
      id = receive_id(members.front(), group_id_tag(), deadline);
    }
    group_ = std::make_unique<NcclGroup>(api_, device_.make_stream(true), id, members,
                                         static_cast<int>(here - members.begin()));
    connect(*group_, deadline);
  }

  NcclUniqueId new_id() {
    NcclUniqueId id;
    const int result = api_.get_unique_id(&id);
    TWOBP_CHECK(result == NcclApi::kSuccess, "rank ", rank(), ": ncclGetUniqueId: ", api_.error_text(result),
                " (NCCL_DEBUG=INFO shows more)");
    return id;
  }

  NcclUniqueId receive_id(int from, const Tag& tag, double deadline) {
    const at::Tensor bytes = host_->receive(from, tag, std::max(deadline - awake_seconds(), 1e-3)).at(0);
    NcclUniqueId id;
    TWOBP_CHECK(bytes.nbytes() == sizeof(id), "rank ", from, " sent a wrong NCCL id");
    std::memcpy(&id, bytes.const_data_ptr(), sizeof(id));
    return id;
  }

  void connect(NcclCommunicator& communicator, double deadline) {
    const bool on_host = options_.tensors == at::kCPU;
    communicator.connect(on_host ? at::Device(at::kCPU) : device_.where(), deadline, [&] {
      Values none;  // throws if another rank has failed
      (void)host_->try_receive(rank() == 0 ? size() - 1 : 0, {.kind = MessageKind::kNone}, none);
    });
  }

  at::Device place() const { return options_.tensors == at::kCPU ? at::Device(at::kCPU) : device_.where(); }

  void queue(int to, const Tag& tag, PackedHead message) {
    const std::lock_guard lock(calls_);
    callers_ = c10::ThreadLocalDebugInfo::current();
    Peer& peer = peers_[to];
    peer.queued.push_back({std::move(message), tag, device_.current().record()});
    push(to);
    if (!peer.queued.empty()) wake_watch();
  }

  // Launches receives in the order in which the other rank sends: of messages with a head that have been announced, and
  // of expected ones up to `asked`, which the rank waits for. Those behind are not launched yet, because a kernel that
  // waits for what this rank has still to cause would block cudaFree, and with it this rank.
  void pull(int from, const Tag* asked = nullptr) {
    if (from == rank()) return;
    Peer& peer = peers_[from];
    while (take_head(peer, from, /*by_link=*/false) || launch_due(peer, asked) ||
           take_head(peer, from, /*by_link=*/true))
      continue;
    refuse_heads(peer, from);
  }

  bool launch_due(Peer& peer, const Tag* asked) {
    const auto next = std::ranges::find(peer.due, false, &Due::launched);
    if (asked == nullptr || next == peer.due.end() || next->values.empty()) return false;
    if (std::find_if(next, peer.due.end(), [&](const Due& due) { return due.tag == *asked; }) == peer.due.end())
      return false;
    next->done = in_nccl([&] {
      peer.receive->under_way();
      return peer.receive->receive(next->values, next->tag);
    });
    next->launched = true;
    peer.launched.push_back({peer.received++, next->tag, next->done});
    return true;
  }

  bool take_head(Peer& peer, int from, bool by_link) {
    int64_t& number = by_link ? peer.received : peer.received_by_host;
    Values head;
    if (!try_head(from, head_tag(number, by_link), head)) return false;
    ++number;
    ReceivedHead message = unpack_head(head, from);
    const auto due = std::ranges::find(peer.due, message.tag, &Due::tag);
    if (due != peer.due.end()) {
      const bool next = due == std::ranges::find(peer.due, false, &Due::launched);
      TWOBP_CHECK(due->values.empty() && (next || !by_link), described_but_expected(from, message.tag));
      peer.due.erase(due);
    }
    DeviceEvent done;
    for (const int i : message.by_host) {
      message.values[i] = on_device(message.values[i], device_.where());
      done = device_.current().record();
    }
    if (!message.on_device.empty()) {
      TWOBP_CHECK(peer.receive, "rank ", from, " sent by NCCL to rank ", rank(), " without a link");
      const OnStream there(peer.receive->stream());  // the memory belongs to this stream
      const Values memory = message.allocate(device_.where(), options_.tensors);
      done = in_nccl([&] {
        peer.receive->under_way();
        return peer.receive->receive(memory, message.tag);
      });
    }
    mailbox_.put({from, message.tag, std::move(message.values), done});
    return true;
  }

  // A receive without a head waits for ever if the other rank sends a head.
  void refuse_heads(Peer& peer, int from) {
    while (!peer.launched.empty() && peer.launched.front().done.passed()) peer.launched.pop_front();
    if (peer.launched.empty()) return;
    Values head;
    if (!try_head(from, head_tag(peer.launched.front().number, /*by_link=*/true), head)) return;
    fail("rank ", from, " sent a description of ", to_string(unpack_head(head, from).tag), ", where rank ", rank(),
         " expects ", to_string(peer.launched.front().tag), " without one: do both run the same plan?");
  }

  // The message is the rank's as soon as few receives before it are under way: its stream waits for the rest.
  bool take_due(int from, const Tag& tag, Message& message) {
    Peer& peer = peers_[from];
    const auto due = std::ranges::find(peer.due, tag, &Due::tag);
    if (due == peer.due.end() || !due->launched) return false;
    if (in_nccl([&] { return peer.receive->under_way(); }) > kReceivesUnderWay) return false;
    message = {from, tag, std::move(due->values), due->done};
    peer.due.erase(due);
    return true;
  }

  std::string described_but_expected(int from, const Tag& tag) const {
    return concat("rank ", from, " sent a description of ", to_string(tag), ", which rank ", rank(),
                  " expects without one, or later: do both run the same plan?");
  }

  bool try_head(int from, const Tag& tag, Values& head) {
    try {
      return host_->try_receive(from, tag, head);
    } catch (const Aborted& aborted) {
      note_abort(aborted.what());
      throw_if_aborted();
      throw;
    }
  }

  // Launches the sends that are allowed now.
  void push(int to) {
    if (to != rank()) in_nccl([&] { push_locked(to); });
  }

  void push_locked(int to) {
    Peer& peer = peers_[to];
    if (peer.send) peer.send->under_way();  // frees what has been sent
    while (!peer.queued.empty()) {
      Outgoing& out = peer.queued.front();
      const bool expected = out.message.head.empty();
      const bool by_link = !out.message.on_device.empty();
      if (by_link) {
        // Otherwise the receiver's kernel would wait for the sender's work, and hold multiprocessors. An expected
        // message has its receive in any case.
        if (!expected && !out.ready.passed()) return;
        if (peer.send->under_way() >= (expected ? kExpectedUnderWay : kUnderWay)) return;
        if (expected) peer.send->stream().wait(out.ready);
        peer.send->send(std::move(out.message.on_device), out.tag);
      }
      const int64_t number = by_link ? peer.sent++ : peer.sent_by_host++;
      if (!expected) host_->isend(to, head_tag(number, by_link), std::move(out.message.head));
      peer.queued.pop_front();
    }
  }

  bool all_sent(int to) {
    if (to == rank()) return true;
    const std::lock_guard call(calls_);
    Peer& peer = peers_[to];
    if (!peer.queued.empty()) return false;
    const std::unique_lock lock(mutex_);
    return !peer.send || peer.send->under_way() == 0;
  }

  Values hand_over(Message message) {
    const DeviceStream user = device_.current();
    user.wait(message.ready);
    for (const at::Tensor& value : message.values) user.uses(value);
    return std::move(message.values);
  }

  // `own`: this rank's watching thread has found the failure, so this rank is the one to report it.
  void note_abort(const std::string& what, bool own = false) {
    const std::lock_guard lock(reason_mutex_);
    if (aborted_.exchange(true)) return;
    reason_ = what;
    own_failure_ = own;
    for_all([](NcclCommunicator& one) { one.interrupt(); });
  }

  void throw_if_aborted() {
    if (!aborted_.load(std::memory_order_acquire)) return;
    abort_all();
    const std::lock_guard lock(reason_mutex_);
    if (own_failure_) throw Error(reason_);
    throw Aborted(reason_);
  }

  void fail_while_watching(const std::string& what) {
    note_abort(concat("rank ", rank(), ": ", what), /*own=*/true);
    host_->abort(what);
  }

  // Runs `call` on communicators. They cannot be aborted during it, unless NCCL does not return.
  template <typename Call>
  std::invoke_result_t<Call> in_nccl(const Call& call) {
    try {
      const std::lock_guard lock(mutex_);
      return call();
    } catch (const Aborted&) {
      throw_if_aborted();  // throws the reason
      throw;
    }
  }

  // All ends of all communicators first say that nothing more comes, so that no two ranks wait for each other, whatever
  // the order in which they destroy them. After kFlushSeconds, they are aborted instead.
  void finalize() {
    const OnStream here(device_.compute());  // sets the thread's current device
    const double deadline = awake_seconds() + kFlushSeconds;
    try {
      for_all([](NcclCommunicator& one) { one.finalize(); });
      for_all([&](NcclCommunicator& one) {
        while (!one.finalized() && awake_seconds() < deadline) std::this_thread::sleep_for(kNcclPause);
      });
    } catch (const std::exception&) {
      // The communicator is aborted.
    }
  }

  void abort_all() {
    for_all([](NcclCommunicator& one) { one.interrupt(); });  // also after a failed start
    // A call that hangs in NCCL keeps the lock. NCCL allows an abort at the same time.
    const auto lock = lock_in_time();
    for_all([](NcclCommunicator& one) { one.abort(); });
  }

  // The lock, held unless that took more than kLockSeconds. This is not std::timed_mutex, because ThreadSanitizer does
  // not recognize its waits.
  std::unique_lock<std::mutex> lock_in_time() {
    std::unique_lock lock(mutex_, std::defer_lock);
    const double deadline = awake_seconds() + kLockSeconds;
    while (!lock.try_lock() && awake_seconds() < deadline) std::this_thread::sleep_for(kNcclPause);
    return lock;
  }

  template <typename Visit>
  void for_all(const Visit& visit) {
    for (Peer& peer : peers_) {
      for (NcclLink* link : {peer.send.get(), peer.receive.get()}) {
        if (link) visit(*link);
      }
    }
    if (group_) visit(*group_);
  }

  // A rank that has done its part of a step looks for no messages, while others still need what it sent. Nothing is
  // allocated here, and nobody is waited for.
  void look() {
    const std::unique_lock lock(calls_, std::try_to_lock);
    std::unique_lock launches(mutex_, std::try_to_lock);
    if (!lock || !launches || aborted_) return;
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(callers_);
    try {
      for (const int to : linked_) push_locked(to);
      launches.unlock();
      for (const int from : linked_) refuse_heads(peers_[from], from);
      waits_ = std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return !peer.queued.empty(); });
    } catch (const Aborted&) {
      // Whoever waits is told.
    } catch (const std::exception& error) {
      if (!aborted_) fail_while_watching(error.what());
    }
  }

  // Messages wait for their tensors.
  void wake_watch() {
    if (waits_) return;
    {
      // Otherwise the wake-up could be lost between the watch's look and its wait.
      const std::lock_guard lock(stop_mutex_);
      waits_ = true;
    }
    stopped_.notify_one();
  }

  void watch() {
    const OnStream here(device_.compute());  // sets the thread's current device
    const auto period = [](double seconds) { return std::chrono::duration<double>(seconds); };
    while (true) {
      {
        std::unique_lock lock(stop_mutex_);
        if (!waits_) stopped_.wait_for(lock, period(kWatchSeconds), [&] { return stop_ || waits_; });
        if (waits_) stopped_.wait_for(lock, period(kPushSeconds), [&] { return stop_; });
        if (stop_) return;
      }
      // First, and without the lock of launches, so that a launch that does not return is noticed.
      std::string trouble;
      for_all([&](NcclCommunicator& one) {
        if (trouble.empty()) trouble = one.trouble(options_.timeout);
      });
      if (!trouble.empty()) fail_while_watching(trouble);
      look();
      if (aborted_) {
        abort_all();
        return;
      }
    }
  }

  std::shared_ptr<Transport> host_;
  NcclApi api_;
  Device device_;
  NcclOptions options_;
  Mailbox mailbox_;
  std::mutex calls_;  // for calls of several subgroups
  // Of the threads that send: their meter of memory, which the watch tells what it frees.
  std::shared_ptr<c10::ThreadLocalDebugInfo> callers_;
  std::vector<Peer> peers_;           // by rank
  std::vector<int> linked_;           // ranks with a link
  std::unique_ptr<NcclGroup> group_;  // null: this rank sums by messages
  Sums sums_;

  std::mutex mutex_;  // held during launches
  std::atomic<bool> aborted_{false};
  std::mutex reason_mutex_;
  std::string reason_;
  bool own_failure_ = false;

  std::mutex stop_mutex_;
  std::condition_variable stopped_;
  bool stop_ = false;
  std::atomic<bool> waits_{false};  // messages wait for their tensors
  std::thread watch_;
};

}  // namespace

std::unique_ptr<Transport> make_nccl_transport(std::shared_ptr<Transport> host, const NcclApi& api,
                                               const Device& device, const NcclLinks& links, const NcclOptions& options,
                                               const std::vector<int>& sums_with) {
  TWOBP_CHECK(device.asynchronous(),
              "the transport nccl needs GPUs: on CPUs start with mpirun (pipeline.transport = \"mpi\") or use "
              "pipeline.transport = \"threads\"");
  return std::make_unique<NcclTransport>(std::move(host), api, device, links, sums_with, options);
}

World make_nccl_world(const Ends& hosts, const NcclApi& api, const std::vector<Device>& devices, int replicas,
                      int ranks, const std::vector<int>& rank_of_stage, const NcclOptions& options) {
  check_processes(hosts[0]->size(), replicas, ranks);
  const bool groups = options.group_sums && replicas > 1;
  NcclLinks links;
  const auto both_ways = [&](int a, int b) {
    links.emplace_back(a, b);
    links.emplace_back(b, a);
  };
  for (int replica = 0; replica < replicas; ++replica) {
    const int first = replica * ranks;
    for (size_t stage = 1; stage < rank_of_stage.size(); ++stage)
      both_ways(first + rank_of_stage[stage - 1], first + rank_of_stage[stage]);
    both_ways(first + rank_of_stage.front(), first + rank_of_stage.back());
    for (int other = 0; other < replica && !groups; ++other) {
      for (int rank = 0; rank < ranks; ++rank) both_ways(first + rank, other * ranks + rank);
    }
  }
  // The ranks of the same place in all replicas.
  const auto sums_with = [&](int rank) {
    std::vector<int> members;
    for (int replica = 0; replica < replicas && groups; ++replica) members.push_back(replica * ranks + rank % ranks);
    return members;
  };
  World world =
      make_process_world(std::make_shared<Ends>(hosts.size(),
                                                [&](int i) {
                                                  return make_nccl_transport(hosts[i], api, devices[i], links, options,
                                                                             sums_with(hosts[i]->rank()));
                                                }),
                         replicas, ranks);
  world.devices.resize(ranks);
  std::copy(devices.begin(), devices.end(), world.devices.begin() + hosts[0]->rank() % ranks);
  return world;
}

}  // namespace twobp
