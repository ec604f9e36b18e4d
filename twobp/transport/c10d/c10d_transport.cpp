#include "twobp/transport/c10d/c10d_transport.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/transport/message.h"
#include "twobp/transport/start.h"
#include "twobp/transport/threads/in_process.h"

namespace twobp {
namespace {

using Work = c10::intrusive_ptr<c10d::Work>;

// A receiver must know the size of what it receives. So every message begins with a frame of this many bytes: the
// length of the head, then the head. The rest of a longer head follows.
constexpr int64_t kFrameBytes = 4096;
constexpr int64_t kMostInFrame = kFrameBytes - static_cast<int64_t>(sizeof(int64_t));
// Lengths that are no length of a head.
constexpr int64_t kIdle = 0;
constexpr int64_t kGoodbye = -1;
// Far from the tags that a program is likely to use on the same group.
constexpr int kFirstTag = 0x74620000;
// Expected messages have tags of their own, so many for each channel.
constexpr int kFirstExpectedTag = 0x60000000;
constexpr int kExpectedTags = 1 << 16;
constexpr int kMostChannels = (kFirstTag - kFirstExpectedTag) / kExpectedTags;
// Seconds for the other processes to say goodbye.
constexpr double kGoodbyePatience = 5;

at::Tensor frame_of(int64_t length, const std::vector<std::byte>& head) {
  at::Tensor frame = at::zeros({kFrameBytes}, at::kByte);
  auto* bytes = frame.mutable_data_ptr<uint8_t>();
  std::memcpy(bytes, &length, sizeof(length));
  if (!head.empty()) {
    std::memcpy(bytes + sizeof(length), head.data(), std::min<size_t>(head.size(), static_cast<size_t>(kMostInFrame)));
  }
  return frame;
}

// The memory of a tensor without gaps, as bytes.
at::Tensor bytes_of(const at::Tensor& tensor) {
  return at::from_blob(
      const_cast<void*>(tensor.const_data_ptr()), {static_cast<int64_t>(tensor.nbytes())}, [tensor](void*) {},
      at::kByte);
}

// A message of F or I that is expected has no frame: its tensors' receives are posted ahead. Gloo tells nobody that a
// receive is done but a thread that waits for it, so such a sender has a second thread.
class C10dTransport : public Transport {
 public:
  C10dTransport(c10::intrusive_ptr<c10d::ProcessGroup> group, const C10dOptions& options)
      : group_(std::move(group)),
        options_(options),
        head_tag_(kFirstTag + 2 * options.channel),
        body_tag_(head_tag_ + 1),
        expected_tag_(kFirstExpectedTag + kExpectedTags * (options.channel % kMostChannels)),
        peers_(group_->getSize()) {
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank()) peers_[peer].receiver = std::thread([this, peer] { receive_from(peer); });
    }
    sender_ = std::thread([this] { watch_sends(); });
  }

  ~C10dTransport() override {
    {
      const std::lock_guard lock(sending_);
      closing_ = true;
      if (!told_abort_) post_to_all(frame_of(kGoodbye, {}));
    }
    sent_.notify_all();
    {
      std::unique_lock lock(receiving_);
      open_at_end_ = !wait_patiently(received_, lock, kGoodbyePatience, [&] { return open_ == 0; });
      gives_up_ = true;
      for (Peer& peer : peers_) {
        if (peer.work) peer.work->abort();
        for (const Arriving& message : peer.arriving) {
          for (const Work& work : message.works) work->abort();
        }
      }
    }
    received_.notify_all();
    {
      const std::lock_guard lock(sending_);
      if (open_at_end_) {
        for (const Posted& posted : posted_) posted.work->abort();
      }
    }
    for (Peer& peer : peers_) {
      if (peer.receiver.joinable()) peer.receiver.join();
      if (peer.awaiter.joinable()) peer.awaiter.join();
    }
    sender_.join();
  }

  int rank() const override { return group_->getRank(); }
  int size() const override { return group_->getSize(); }

  void isend(int to, const Tag& tag, Values values) override {
    check_receiver(to);
    if (to == rank()) {
      mailbox_.put({to, tag, std::move(values), {}});
      return;
    }
    const std::lock_guard lock(sending_);
    if (stopped_) return;
    const OutgoingMessage message = pack_message(tag, peers_[to].sent++, values);
    post_head(to, message.head);
    for (const at::Tensor& tensor : message.apart) post(to, bytes_of(tensor), body_tag_);
  }

  bool expect(int from, const Tag& tag, const Forms& forms) override {
    check_sender(from);
    const std::optional<int> number = number_of_expected(tag, kExpectedTags);
    if (from == rank() || !number || forms.empty()) return false;
    throw_if_stopped();
    const std::lock_guard lock(receiving_);
    Peer& peer = peers_[from];
    if (std::ranges::find(peer.expected, tag) != peer.expected.end()) return true;
    if (mailbox_.has(from, tag)) fail(described_but_expected(from, tag));
    Arriving message{tag, {}, {}};
    for (const Form& form : forms) {
      message.values.push_back(memory_.allocate(form.sizes, form.strides, form.type));
      std::vector<at::Tensor> bytes = {bytes_of(message.values.back())};
      message.works.push_back(group_->recv(bytes, from, expected_tag_ + *number));
    }
    peer.expected.push_back(tag);
    peer.arriving.push_back(std::move(message));
    if (!peer.awaiter.joinable()) peer.awaiter = std::thread([this, from] { await_expected(from); });
    received_.notify_all();
    return true;
  }

  void isend_expected(int to, const Tag& tag, Values values) override {
    check_receiver(to);
    const std::optional<int> number = number_of_expected(tag, kExpectedTags);
    if (to == rank() || !number) return isend(to, tag, std::move(values));
    const std::lock_guard lock(sending_);
    if (stopped_) return;
    for (const at::Tensor& tensor : dense(std::move(values))) post(to, bytes_of(tensor), expected_tag_ + *number);
  }

  bool try_receive(int from, const Tag& tag, Values& values) override {
    check_sender(from);
    throw_if_stopped();
    Message message;
    if (!mailbox_.take(from, tag, message)) return false;
    values = taken(std::move(message));
    return true;
  }

  Values receive(int from, const Tag& tag, double timeout) override {
    check_sender(from);
    throw_if_stopped();
    Message message;
    if (mailbox_.wait(from, tag, message, timeout, options_.spin_seconds, stopped_)) return taken(std::move(message));
    throw_if_stopped();
    fail_waiting(rank(), timeout, tag, from);
  }

  std::optional<int> unsent_to() override {
    std::unique_lock lock(sending_);
    if (posted_.empty()) return std::nullopt;
    const int to = posted_.front().to;
    lock.unlock();
    throw_if_stopped();
    return to;
  }

  void abort(const std::string& reason) override {
    {
      const std::lock_guard lock(sending_);
      if (stop(reason, /*lost=*/false) || (lost() && !told_abort_)) {
        told_abort_ = true;
        try {
          const std::vector<std::byte> head = pack_abort(reason);
          for (int peer = 0; peer < size(); ++peer) {
            if (peer != rank()) post_head(peer, head);
          }
        } catch (const std::exception&) {  // a peer that is gone needs no message
        }
      }
    }
    sent_.notify_all();
  }

 private:
  struct Arriving {
    Tag tag;
    Values values;
    std::vector<Work> works;  // a receive for each of `values`
  };
  struct Peer {
    std::thread receiver;
    Work work;  // the receive under way
    int64_t sent = 0;
    std::thread awaiter;            // of expected messages
    std::deque<Arriving> arriving;  // in the order in which they were expected
    std::vector<Tag> expected;      // messages that the rank has not taken
  };
  struct Posted {
    Work work;
    at::Tensor memory;
    int to;
  };

  // Ends all waits. Returns false if they have ended before. `lost`: this rank is the one that reports.
  bool stop(const std::string& reason, bool lost) {
    {
      const std::lock_guard lock(reason_mutex_);
      if (stopped_) return false;
      reason_ = reason;
      lost_ = lost;
      stopped_ = true;
    }
    mailbox_.wake();
    return true;
  }

  bool lost() {
    const std::lock_guard lock(reason_mutex_);
    return lost_;
  }

  void throw_if_stopped() {
    if (!stopped_.load(std::memory_order_acquire)) return;
    const std::lock_guard lock(reason_mutex_);
    if (lost_) fail("rank ", rank(), ": ", reason_);
    throw Aborted(concat("rank ", rank(), " stopped: ", reason_));
  }

  // The functions below need the lock of `sending_`.
  void post(int to, at::Tensor memory, int tag) {
    std::vector<at::Tensor> tensors = {memory};
    Work work = group_->send(tensors, to, tag);
    posted_.push_back({std::move(work), std::move(memory), to});
    sent_.notify_all();
  }
  void post_head(int to, const std::vector<std::byte>& head) {
    const auto length = static_cast<int64_t>(head.size());
    post(to, frame_of(length, head), head_tag_);
    if (length <= kMostInFrame) return;
    at::Tensor rest = at::empty({length - kMostInFrame}, at::kByte);
    std::memcpy(rest.mutable_data_ptr(), head.data() + kMostInFrame, rest.nbytes());
    post(to, std::move(rest), head_tag_);
  }
  void post_to_all(const at::Tensor& frame) {
    try {
      for (int peer = 0; peer < size(); ++peer) {
        if (peer != rank()) post(peer, frame, head_tag_);
      }
    } catch (const std::exception&) {  // its receiver notices that the peer is gone
    }
  }

  // Keeps the memory of messages until they are sent.
  void watch_sends() {
    std::unique_lock lock(sending_);
    while (true) {
      const bool woken =
          wait_patiently(sent_, lock, options_.idle_seconds, [&] { return !posted_.empty() || closing_; });
      if (posted_.empty()) {
        if (closing_) return;
        if (!woken && !stopped_) post_to_all(frame_of(kIdle, {}));
        continue;
      }
      const Work work = posted_.front().work;
      const int to = posted_.front().to;
      lock.unlock();
      try {
        work->wait();
      } catch (const std::exception& error) {
        lose(to, error.what());
      }
      lock.lock();
      posted_.pop_front();
      sent_.notify_all();
    }
  }

  void lose(int peer, const std::string& why) {
    if (!closing_) stop(concat("lost the connection to rank ", peer, ": ", first_line(why)), /*lost=*/true);
  }

  Values taken(Message message) {
    const std::lock_guard lock(receiving_);
    std::erase(peers_[message.from].expected, message.tag);
    return std::move(message.values);
  }

  std::string described_but_expected(int from, const Tag& tag) const {
    return concat("rank ", from, " sent a description of ", to_string(tag), ", which rank ", rank(),
                  " expects without one: do both run the same plan?");
  }

  static std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

  // Returns false if the wait was given up.
  bool read(int peer, const at::Tensor& bytes, int tag) {
    std::vector<at::Tensor> tensors = {bytes};
    Work work;
    {
      const std::lock_guard lock(receiving_);
      if (gives_up_) return false;
      work = group_->recv(tensors, peer, tag);
      peers_[peer].work = work;
    }
    return work->wait();
  }

  // One message. Returns false after the last.
  bool read_message(int peer) {
    const at::Tensor frame = at::empty({kFrameBytes}, at::kByte);
    if (!read(peer, frame, head_tag_)) return false;
    int64_t length = 0;
    std::memcpy(&length, frame.const_data_ptr(), sizeof(length));
    if (length == kGoodbye) return false;
    if (length == kIdle) return true;
    TWOBP_CHECK(length > 0 && length <= kMostHeadBytes, "a message from rank ", peer, " makes no sense: a head of ",
                length, " bytes");
    std::vector<std::byte> head(static_cast<size_t>(length));
    const int64_t here = std::min(length, kMostInFrame);
    std::memcpy(head.data(), frame.const_data_ptr<uint8_t>() + sizeof(length), static_cast<size_t>(here));
    if (length > here) {
      const at::Tensor rest = at::empty({length - here}, at::kByte);
      if (!read(peer, rest, head_tag_)) return false;
      std::memcpy(head.data() + here, rest.const_data_ptr(), rest.nbytes());
    }
    IncomingMessage message = unpack_message(head, peer, &memory_);
    if (message.is_abort) {
      stop(message.reason, /*lost=*/false);
      return false;
    }
    for (const at::Tensor& tensor : message.apart) {
      if (!read(peer, bytes_of(tensor), body_tag_)) return false;
    }
    message.apart.clear();
    const std::lock_guard lock(receiving_);  // so that it is either here, or expected
    const std::vector<Tag>& expected = peers_[peer].expected;
    if (std::ranges::find(expected, message.tag) != expected.end()) {
      stop(described_but_expected(peer, message.tag), /*lost=*/true);
      return true;  // reads on, until the other rank has heard of the end
    }
    mailbox_.put({peer, message.tag, std::move(message.values), {}});
    return true;
  }

  void await_expected(int from) {
    std::deque<Arriving>& arriving = peers_[from].arriving;
    try {
      while (true) {
        std::unique_lock lock(receiving_);
        wait_patiently(received_, lock, options_.idle_seconds, [&] { return gives_up_ || !arriving.empty(); });
        if (gives_up_) return;
        if (arriving.empty()) continue;
        const std::vector<Work> works = arriving.front().works;
        lock.unlock();
        for (const Work& work : works) {
          if (!work->wait()) return;
        }
        lock.lock();
        Arriving message = std::move(arriving.front());
        arriving.pop_front();
        lock.unlock();
        mailbox_.put({from, message.tag, std::move(message.values), {}});
      }
    } catch (const std::exception& error) {
      lose(from, error.what());
    }
  }

  void receive_from(int peer) {
    try {
      while (read_message(peer)) {
      }
    } catch (const std::exception& error) {
      lose(peer, error.what());
    }
    {
      const std::lock_guard lock(receiving_);
      peers_[peer].work.reset();
      --open_;
    }
    received_.notify_all();
  }

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const C10dOptions options_;
  const int head_tag_;
  const int body_tag_;
  const int expected_tag_;  // the first one
  ReceiveMemory memory_;
  Mailbox mailbox_;

  std::mutex reason_mutex_;
  std::string reason_;
  bool lost_ = false;
  std::atomic<bool> stopped_{false};
  std::atomic<bool> closing_{false};

  std::mutex sending_;
  std::condition_variable sent_;  // also: something was posted
  std::deque<Posted> posted_;
  bool told_abort_ = false;  // the others expect nothing more from this rank

  std::mutex receiving_;  // also guards what is expected of peers
  std::condition_variable received_;
  bool gives_up_ = false;
  bool open_at_end_ = false;          // a peer did not say goodbye in time
  int open_ = group_->getSize() - 1;  // peers that have not said goodbye

  std::vector<Peer> peers_;
  std::thread sender_;
};

}  // namespace

std::unique_ptr<Transport> make_c10d_transport(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                               const C10dOptions& options) {
  TWOBP_CHECK(group, "a transport needs a process group: call torch.distributed.init_process_group first");
  return std::make_unique<C10dTransport>(std::move(group), options);
}

World make_c10d_world(c10::intrusive_ptr<c10d::ProcessGroup> group, int replicas, int ranks,
                      const C10dOptions& options) {
  if (group) check_processes(group->getSize(), replicas, ranks);
  return make_process_world(make_c10d_transport(std::move(group), options), replicas, ranks);
}

}  // namespace twobp
