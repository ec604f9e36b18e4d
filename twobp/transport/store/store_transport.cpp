#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <optional>
#include <thread>

#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/core/text.h"
#include "twobp/transport/message.h"
#include "twobp/transport/store/store_connection.h"
#include "twobp/transport/threads/in_process.h"

namespace twobp {
namespace {

// The content of one value in a rank's queue: a part of a message, its last part, an abort, or the request to stop.
enum class Part : uint32_t { kMore, kLast, kAbort, kStop };

struct PartHead {
  int32_t from = 0;
  Part part = Part::kLast;
};
static_assert(sizeof(PartHead) == 8);
constexpr size_t kPartBytes = StoreConnection::kMostBytes - sizeof(PartHead);

std::string part_of(int from, Part part, const char* data, size_t bytes) {
  const PartHead head{from, part};
  std::string text(sizeof(head) + bytes, '\0');
  std::memcpy(text.data(), &head, sizeof(head));
  if (bytes > 0) std::memcpy(text.data() + sizeof(head), data, bytes);
  return text;
}

constexpr double kReasonSeconds = 2;    // time for the others to read why this rank stopped
constexpr double kAnswerSeconds = 1.5;  // time for the store to say whether another rank failed first
constexpr double kListenerSeconds = 2;  // time for the listener to notice that it must stop

using Failure = Transport::Failure;

std::string queue_of(int rank) {
  return concat("to/", rank);
}

Message unpack(int from, const std::string& bytes) {
  uint64_t head = 0;
  TWOBP_CHECK(bytes.size() >= sizeof(head), "a message from rank ", from, " ends too early");
  std::memcpy(&head, bytes.data(), sizeof(head));
  const size_t left = bytes.size() - sizeof(head);
  TWOBP_CHECK(head <= left, "a message from rank ", from, " ends too early");
  const auto* begin = reinterpret_cast<const std::byte*>(bytes.data() + sizeof(head));
  IncomingMessage message = unpack_message({begin, static_cast<size_t>(head)}, from);
  const char* data = bytes.data() + sizeof(head) + head;
  size_t rest = left - head;
  for (at::Tensor& tensor : message.apart) {
    TWOBP_CHECK(tensor.nbytes() <= rest, "a message from rank ", from, " ends too early");
    std::memcpy(tensor.mutable_data_ptr(), data, tensor.nbytes());
    data += tensor.nbytes();
    rest -= tensor.nbytes();
  }
  TWOBP_CHECK(rest == 0, "a message from rank ", from, " is longer than it says");
  return {from, message.tag, std::move(message.values), {}};
}

// A rank's end of the store. The listener shares it and may outlive the transport: if the store's process is frozen or
// the network is cut, its wait for the next value never ends.
class StoreEnd {
 public:
  StoreEnd(std::shared_ptr<StoreConnection> connection, size_t most_unfinished)
      : connection_(std::move(connection)), inbox_(connection_->connect()), most_unfinished_(most_unfinished) {}

  int rank() const { return connection_->rank(); }
  int size() const { return connection_->size(); }
  Mailbox& mailbox() { return mailbox_; }
  const std::atomic<bool>& aborted() const { return aborted_; }

  void send(int to, const std::string& bytes) {
    // The receiver joins the parts of one sender in their order of arrival.
    const std::lock_guard lock(sends_);
    for (size_t begin = 0; begin < bytes.size(); begin += kPartBytes) {
      const size_t count = std::min(kPartBytes, bytes.size() - begin);
      const Part part = begin + count == bytes.size() ? Part::kLast : Part::kMore;
      connection_->push(queue_of(to), part_of(rank(), part, bytes.data() + begin, count));
    }
  }

  void abort(const std::string& reason) {
    const std::lock_guard one(aborts_);  // who comes second waits until it is known which rank failed first
    if (!stop_waits({rank(), reason})) return;
    const Failure first = tell_all({rank(), reason});
    const std::lock_guard lock(mutex_);
    failure_ = first;
  }

  std::optional<Failure> first_failure() {
    if (!aborted_.load(std::memory_order_acquire)) return std::nullopt;
    const std::lock_guard lock(mutex_);
    return failure_;
  }

  void throw_if_aborted() {
    if (!aborted_.load(std::memory_order_acquire)) return;
    const std::lock_guard lock(mutex_);
    throw Aborted(concat("rank ", rank(), " stopped: ", failure_.reason));
  }

  // The listener thread's function.
  void listen() {
    try {
      take_in();
    } catch (const std::exception& error) {
      if (!stopping_) abort(error.what());  // the others must know that this rank receives nothing any more
    }
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
  }

  // Tells the listener to stop. Returns whether it has stopped.
  bool stop() {
    stopping_ = true;
    if (silent_) return false;
    try {
      connection_->push(queue_of(rank()), part_of(rank(), Part::kStop, nullptr, 0));
    } catch (const std::exception&) {
      // The store no longer exists. The listener notices that and stops, unless the network hides it.
    }
    std::unique_lock lock(mutex_);
    return wait_patiently(changed_, lock, kListenerSeconds, [&] { return ended_; });
  }

 private:
  bool stop_waits(const Failure& failure) {
    {
      const std::lock_guard lock(mutex_);
      if (aborted_.exchange(true)) return false;
      failure_ = failure;
    }
    connection_->leave_within(kReasonSeconds);
    mailbox_.wake();
    return true;
  }

  // Tells the other ranks why the run ends, and returns it. When a rank falls silent, all that wait for it fail at the
  // same time. Then the first that asks the store is the one whose failure counts. A thread asks, because the answer
  // never comes if the store's process is frozen. In that case, this rank counts as the first.
  Failure tell_all(const Failure& own) {
    struct Told {
      std::mutex mutex;
      std::condition_variable changed;
      bool done = false;
      Failure first;
    };
    const auto told = std::make_shared<Told>();
    told->first = own;
    std::thread([told, own, connection = connection_] {
      try {
        const std::string text = connection->set_once("failure", concat(own.rank, ' ', own.reason));
        const size_t space = text.find(' ');
        const Failure first{std::stoi(text.substr(0, space)), text.substr(space + 1)};
        {
          const std::lock_guard lock(told->mutex);
          told->first = first;
        }
        const std::string& why = first.reason;
        const std::string part = part_of(first.rank, Part::kAbort, why.data(), std::min(why.size(), kPartBytes));
        // The first tells all. If it ends before, they fail by themselves, and ask the store.
        for (int to = 0; to < connection->size() && first.rank == own.rank; ++to) {
          if (to != own.rank) connection->push(queue_of(to), part);
        }
      } catch (const std::exception&) {
        // The store no longer exists, and the others notice that themselves.
      }
      const std::lock_guard lock(told->mutex);
      told->done = true;
      told->changed.notify_all();
    }).detach();
    std::unique_lock lock(told->mutex);
    silent_ = !wait_patiently(told->changed, lock, kAnswerSeconds, [&] { return told->done; });
    return told->first;
  }

  void take_in() {
    std::map<int, std::string> begun;  // by sender
    size_t unfinished = 0;             // bytes in `begun`
    while (true) {
      const std::string text = inbox_->pop(queue_of(rank()));
      PartHead head;
      TWOBP_CHECK(text.size() >= sizeof(head), "rank ", rank(), " got ", text.size(), " bytes that are no message");
      std::memcpy(&head, text.data(), sizeof(head));
      TWOBP_CHECK(head.from >= 0 && head.from < size() && head.part <= Part::kStop, "rank ", rank(),
                  " got bytes that are no message");
      if (head.part == Part::kStop) return;
      std::string& bytes = begun[head.from];
      if (head.part == Part::kAbort) {
        stop_waits({head.from, text.substr(sizeof(head))});
        continue;
      }
      unfinished += text.size() - sizeof(head);
      TWOBP_CHECK(unfinished <= most_unfinished_, "rank ", rank(), " got more than ",
                  format_bytes(static_cast<double>(most_unfinished_)),
                  " of messages without an end, the last part from rank ", head.from,
                  ": does another program write to the store?");
      bytes.append(text, sizeof(head));
      if (head.part == Part::kMore) continue;
      unfinished -= bytes.size();
      mailbox_.put(unpack(head.from, bytes));
      bytes = {};
    }
  }

  std::shared_ptr<StoreConnection> connection_;
  std::unique_ptr<StoreConnection> inbox_;
  size_t most_unfinished_;
  Mailbox mailbox_;
  std::mutex sends_;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> aborted_{false};
  std::atomic<bool> silent_{false};  // the store does not answer
  std::mutex aborts_;
  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  Failure failure_;     // the first of all ranks that is known here
  bool ended_ = false;  // the listener has stopped
};

class StoreTransport : public Transport {
 public:
  StoreTransport(std::shared_ptr<StoreConnection> connection, size_t most_unfinished)
      : end_(std::make_shared<StoreEnd>(std::move(connection), most_unfinished)),
        listener_([end = end_] { end->listen(); }) {}

  ~StoreTransport() override {
    if (end_->stop()) {
      listener_.join();
    } else {
      listener_.detach();
    }
  }

  int rank() const override { return end_->rank(); }
  int size() const override { return end_->size(); }

  void isend(int to, const Tag& tag, Values values) override {
    check_receiver(to);
    end_->throw_if_aborted();
    const OutgoingMessage message = pack_message(tag, 0, values);
    // The head's length, the head, and the memory of the tensors outside the head.
    std::string bytes(sizeof(uint64_t), '\0');
    const uint64_t head = message.head.size();
    std::memcpy(bytes.data(), &head, sizeof(head));
    bytes.append(reinterpret_cast<const char*>(message.head.data()), message.head.size());
    for (const at::Tensor& tensor : message.apart) {
      bytes.append(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
    }
    end_->send(to, bytes);
  }

  bool try_receive(int from, const Tag& tag, Values& values) override {
    check_sender(from);
    end_->throw_if_aborted();
    Message message;
    if (!end_->mailbox().take(from, tag, message)) return false;
    values = std::move(message.values);
    return true;
  }

  Values receive(int from, const Tag& tag, double timeout) override {
    check_sender(from);
    Message message;
    if (end_->mailbox().wait(from, tag, message, timeout, 0, end_->aborted())) return std::move(message.values);
    end_->throw_if_aborted();
    fail_waiting(rank(), timeout, tag, from);
  }

  void abort(const std::string& reason) override { end_->abort(reason); }
  std::optional<Failure> first_failure() const override { return end_->first_failure(); }

 private:
  std::shared_ptr<StoreEnd> end_;
  std::thread listener_;
};

}  // namespace

std::unique_ptr<Transport> make_store_transport(std::shared_ptr<StoreConnection> connection, size_t most_unfinished) {
  return std::make_unique<StoreTransport>(std::move(connection), most_unfinished);
}

}  // namespace twobp
