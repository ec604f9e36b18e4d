#include "twobp/transport/mpi/mpi_endpoint.h"

#include <algorithm>
#include <sched.h>
#include <string>
#include <thread>

#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/transport/message.h"

namespace twobp {
namespace {

constexpr int kHeadTag = 0;
// Half of the other tags are for the tensors of messages with a head, the rest for those of expected messages.
int payload_tag(int64_t number, int tags) {
  return 1 + static_cast<int>(number % (tags / 2));
}
std::optional<int> tag_of_expected(const Tag& tag, int tags) {
  const std::optional<int> number = number_of_expected(tag, tags - 1 - tags / 2);
  if (!number) return std::nullopt;
  return 1 + tags / 2 + *number;
}
// After this many seconds, a spinning wait yields the core.
constexpr double kPoliteAfter = 200e-6;
// Seconds of spinning if processes share cores.
constexpr double kSharedCoreSpin = 50e-6;
// Sleeps between polls grow: each is this fraction of the time waited. So a frozen peer costs no core, and a late
// message costs little time.
constexpr double kSleepPart = 0.01;
constexpr double kLeastSleep = 5e-6;  // seconds
constexpr double kMostSleep = 1e-3;
// Seconds for an aborting rank to send its reason.
constexpr double kAbortGrace = 0.5;

}  // namespace

MpiEndpoint::MpiEndpoint(MPI_Comm communicator, const MpiOptions& options, bool spins)
    : communicator_(communicator), options_(options), spins_(spins) {
  TWOBP_CHECK(options.chunk_bytes > 0 && options.chunk_bytes <= (int64_t{1} << 30),
              "an MPI message carries 1 byte to 1 GiB, not ", options.chunk_bytes);
  check_mpi(MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN), "set an error handler");
  check_mpi(MPI_Comm_rank(communicator_, &rank_), "tell the rank");
  check_mpi(MPI_Comm_size(communicator_, &size_), "tell the number of ranks");
  int* most = nullptr;
  int there = 0;
  check_mpi(MPI_Comm_get_attr(communicator_, MPI_TAG_UB, &most, &there), "tell its highest tag");
  tags_ = there != 0 ? *most : 32767;  // the standard's guarantee
  peers_ = std::vector<Peer>(size_);
}

// A message that was never sent keeps its memory, because MPI may still read it.
MpiEndpoint::~MpiEndpoint() {
  for (auto& out : outgoing_) static_cast<void>(out.release());
  for (Peer& peer : peers_) {
    for (auto& head : peer.heads) static_cast<void>(head.release());
    for (auto& message : peer.messages) {
      if (!message->there) static_cast<void>(message.release());
    }
  }
}

void MpiEndpoint::isend(int to, const Tag& tag, Values values) {
  check_receiver(to);
  const std::lock_guard lock(mutex_);
  if (aborted_) return;
  if (to == rank_) {
    auto message = std::make_unique<Incoming>();
    message->message.tag = tag;
    message->message.values = std::move(values);
    message->there = true;
    peers_[to].messages.push_back(std::move(message));
    return;
  }
  const int64_t number = peers_[to].sent++;
  OutgoingMessage packed = pack_message(tag, number, values);
  auto out = std::make_unique<Outgoing>();
  out->to = to;
  out->head = std::move(packed.head);
  out->tensors = std::move(packed.apart);
  outgoing_.push_back(std::move(out));
  send_head(*outgoing_.back());
  send_tensors(*outgoing_.back(), payload_tag(number, tags_));
}

void MpiEndpoint::isend_expected(int to, const Tag& tag, Values values) {
  check_receiver(to);
  const std::optional<int> mpi_tag = tag_of_expected(tag, tags_);
  if (to == rank_ || !mpi_tag) return isend(to, tag, std::move(values));
  const std::lock_guard lock(mutex_);
  if (aborted_) return;
  auto out = std::make_unique<Outgoing>();
  out->to = to;
  const Values tensors = dense(std::move(values));
  out->tensors.assign(tensors.begin(), tensors.end());
  outgoing_.push_back(std::move(out));
  send_tensors(*outgoing_.back(), *mpi_tag);
}

bool MpiEndpoint::expect(int from, const Tag& tag, const Forms& forms) {
  check_sender(from);
  const std::optional<int> mpi_tag = tag_of_expected(tag, tags_);
  if (from == rank_ || !mpi_tag || forms.empty()) return false;
  const std::lock_guard lock(mutex_);
  throw_if_aborted();
  auto& messages = peers_[from].messages;
  const auto is_this = [&](const auto& known) { return known->message.tag == tag; };
  if (const auto known = std::ranges::find_if(messages, is_this); known != messages.end()) {
    TWOBP_CHECK((*known)->expected, "rank ", from, " sent a description of ", to_string(tag), ", which rank ", rank_,
                " expects without one: do both run the same plan?");
    return true;
  }
  auto message = std::make_unique<Incoming>();
  message->message.tag = tag;
  message->expected = true;
  for (const Form& form : forms)
    message->message.values.push_back(memory_.allocate(form.sizes, form.strides, form.type));
  message->message.apart.assign(message->message.values.begin(), message->message.values.end());
  messages.push_back(std::move(message));
  receive_tensors(from, *messages.back(), *mpi_tag);
  return true;
}

void MpiEndpoint::send_head(Outgoing& out) {
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Isend(out.head.data(), static_cast<int>(out.head.size()), MPI_BYTE, out.to, kHeadTag, communicator_,
                      &request),
            "send a message");
  requests_.add(request, out);
}

void MpiEndpoint::send_tensors(Outgoing& out, int mpi_tag) {
  MPI_Request request = MPI_REQUEST_NULL;
  for (const at::Tensor& tensor : out.tensors) {
    const auto* memory = static_cast<const std::byte*>(tensor.const_data_ptr());
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    for (int64_t begin = 0; begin < bytes; begin += options_.chunk_bytes) {
      const auto count = static_cast<int>(std::min(options_.chunk_bytes, bytes - begin));
      check_mpi(MPI_Isend(memory + begin, count, MPI_BYTE, out.to, mpi_tag, communicator_, &request), "send a tensor");
      requests_.add(request, out);
    }
  }
}

void MpiEndpoint::take_heads() {
  while (true) {
    int there = 0;
    MPI_Message message = MPI_MESSAGE_NULL;
    MPI_Status status;
    check_mpi(MPI_Improbe(MPI_ANY_SOURCE, kHeadTag, communicator_, &there, &message, &status), "look for messages");
    if (there == 0) return;
    int bytes = 0;
    check_mpi(MPI_Get_count(&status, MPI_BYTE, &bytes), "count what it received");
    const int from = status.MPI_SOURCE;
    TWOBP_CHECK(bytes >= 0 && bytes <= kMostHeadBytes, "a message from rank ", from, " makes no sense: a head of ",
                bytes, " bytes");
    auto head = std::make_unique<Head>();
    head->bytes.resize(bytes);
    MPI_Request request = MPI_REQUEST_NULL;
    check_mpi(MPI_Imrecv(head->bytes.data(), bytes, MPI_BYTE, &message, &request), "receive a message");
    // The head has nearly always arrived already.
    int received = 0;
    check_mpi(MPI_Test(&request, &received, MPI_STATUS_IGNORE), "receive a message");
    if (received == 0) requests_.add(request, *head, bytes);
    peers_[from].heads.push_back(std::move(head));
    open_heads(from);
  }
}

void MpiEndpoint::open_heads(int from) {
  auto& heads = peers_[from].heads;
  while (!heads.empty() && heads.front()->open == 0) {
    begin_receive(from, *heads.front());
    heads.pop_front();
  }
}

void MpiEndpoint::begin_receive(int from, Head& head) {
  auto message = std::make_unique<Incoming>();
  message->message = unpack_message(head.bytes, from, &memory_);
  if (message->message.is_abort) {
    if (!aborted_) reason_ = message->message.reason;
    aborted_ = true;
    return;
  }
  const auto is_expected = [&](const auto& known) {
    return !known->there && known->expected && known->message.tag == message->message.tag;
  };
  TWOBP_CHECK(std::ranges::none_of(peers_[from].messages, is_expected), "rank ", from, " sent a description of ",
              to_string(message->message.tag), ", which rank ", rank_,
              " expected without one: do both run the same plan?");
  peers_[from].messages.push_back(std::move(message));
  Incoming& in = *peers_[from].messages.back();
  receive_tensors(from, in, payload_tag(in.message.number, tags_));
}

void MpiEndpoint::receive_tensors(int from, Incoming& in, int mpi_tag) {
  for (const at::Tensor& tensor : in.message.apart) {
    auto* memory = static_cast<std::byte*>(tensor.mutable_data_ptr());
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    for (int64_t begin = 0; begin < bytes; begin += options_.chunk_bytes) {
      const auto count = static_cast<int>(std::min(options_.chunk_bytes, bytes - begin));
      MPI_Request request = MPI_REQUEST_NULL;
      check_mpi(MPI_Irecv(memory + begin, count, MPI_BYTE, from, mpi_tag, communicator_, &request), "receive a tensor");
      requests_.add(request, in, count);
    }
  }
  in.message.apart.clear();
  in.there = in.open == 0;
}

void MpiEndpoint::poll() {
  take_heads();
  done_.clear();
  requests_.test(done_);
  bool heads = false;
  for (Transfer* transfer : done_) {
    if (auto* in = dynamic_cast<Incoming*>(transfer)) {
      in->there = true;
    } else if (dynamic_cast<Outgoing*>(transfer) != nullptr) {
      outgoing_.remove_if([&](const auto& out) { return out.get() == transfer; });
    } else {
      heads = true;
    }
  }
  for (int from = 0; heads && from < size_; ++from) open_heads(from);
}

bool MpiEndpoint::take(int from, const Tag& tag, Values& values) {
  auto& messages = peers_[from].messages;
  for (auto it = messages.begin(); it != messages.end(); ++it) {
    IncomingMessage& message = (*it)->message;
    if (!(message.tag == tag)) continue;
    if (!(*it)->there) return false;  // messages of one tag keep their order
    values = std::move(message.values);
    messages.erase(it);
    return true;
  }
  return false;
}

void MpiEndpoint::throw_if_aborted() const {
  if (aborted_) throw Aborted(concat("rank ", rank_, " stopped: ", reason_));
}

bool MpiEndpoint::try_receive(int from, const Tag& tag, Values& values) {
  check_sender(from);
  const std::lock_guard lock(mutex_);
  throw_if_aborted();
  if (take(from, tag, values)) return true;
  poll();
  throw_if_aborted();
  return take(from, tag, values);
}

template <typename Done>
bool MpiEndpoint::wait(double timeout, Done&& done) {
  const double begin = awake_seconds();
  while (true) {
    {
      const std::lock_guard lock(mutex_);
      if (done()) return true;
    }
    const double waited = awake_seconds() - begin;
    if (waited >= timeout) return false;
    if (waited < (spins_ ? options_.spin_seconds : kSharedCoreSpin)) {
      if (!spins_ || waited > kPoliteAfter) sched_yield();
      continue;
    }
    const double sleep = std::clamp(kSleepPart * waited, kLeastSleep, kMostSleep);
    std::this_thread::sleep_for(std::chrono::duration<double>(std::min(sleep, timeout - waited)));
  }
}

Values MpiEndpoint::receive(int from, const Tag& tag, double timeout) {
  check_sender(from);
  Values values;
  const auto there = [&] {
    throw_if_aborted();
    if (take(from, tag, values)) return true;
    poll();
    throw_if_aborted();
    return take(from, tag, values);
  };
  if (wait(timeout, there)) return values;
  fail_waiting(rank_, timeout, tag, from);
}

void MpiEndpoint::progress() {
  const std::lock_guard lock(mutex_);
  if (!aborted_) poll();
}

std::optional<int> MpiEndpoint::unsent_to() {
  const std::lock_guard lock(mutex_);
  throw_if_aborted();
  poll();
  throw_if_aborted();
  if (outgoing_.empty()) return std::nullopt;
  return outgoing_.front()->to;
}

bool MpiEndpoint::aborted() {
  const std::lock_guard lock(mutex_);
  return aborted_;
}

void MpiEndpoint::abort(const std::string& reason) {
  try {
    {
      const std::lock_guard lock(mutex_);
      if (aborted_) return;
      aborted_ = true;
      reason_ = reason;
      for (int to = 0; to < size_; ++to) {
        if (to == rank_) continue;
        auto out = std::make_unique<Outgoing>();
        out->to = to;
        out->head = pack_abort(reason);
        outgoing_.push_back(std::move(out));
        send_head(*outgoing_.back());
      }
    }
    // Only the abort message must be sent. Other messages may wait for a dead rank.
    wait(kAbortGrace, [&] {
      poll();
      return std::none_of(outgoing_.begin(), outgoing_.end(), [](const auto& out) { return out->tensors.empty(); });
    });
  } catch (const std::exception&) {
    // The error to report is the reason for the abort.
  }
}

void check_mpi(int code, const char* what) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  fail("MPI failed to ", what, ": ", std::string(text, length));
}

void MpiRequests::add(MPI_Request request, Transfer& transfer, int bytes) {
  requests_.push_back(request);
  about_.push_back({&transfer, bytes});
  ++transfer.open;
}

void MpiRequests::test(std::vector<Transfer*>& done) {
  if (requests_.empty()) return;
  indices_.resize(requests_.size());
  statuses_.resize(requests_.size());
  int count = 0;
  const int code =
      MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &count, indices_.data(), statuses_.data());
  if (code == MPI_ERR_IN_STATUS) {
    for (int i = 0; i < count; ++i) {
      const int error = statuses_[i].MPI_ERROR;
      TWOBP_CHECK(error != MPI_ERR_TRUNCATE, "rank ", statuses_[i].MPI_SOURCE, " sent more bytes of a tensor than the ",
                  about_[indices_[i]].bytes, " that were expected");
      check_mpi(error, "move a message");
    }
  }
  check_mpi(code, "move a message");
  if (count == MPI_UNDEFINED || count == 0) return;
  for (int i = 0; i < count; ++i) {
    const About& about = about_[indices_[i]];
    if (about.bytes >= 0) {
      int bytes = 0;
      check_mpi(MPI_Get_count(&statuses_[i], MPI_BYTE, &bytes), "count what it received");
      TWOBP_CHECK(bytes == about.bytes, "rank ", statuses_[i].MPI_SOURCE, " sent ", bytes,
                  " bytes of a tensor of which ", about.bytes, " were expected");
    }
    if (--about.transfer->open == 0) done.push_back(about.transfer);
  }
  size_t kept = 0;
  for (size_t i = 0; i < requests_.size(); ++i) {
    if (requests_[i] == MPI_REQUEST_NULL) continue;
    requests_[kept] = requests_[i];
    about_[kept++] = about_[i];
  }
  requests_.resize(kept);
  about_.resize(kept);
}

}  // namespace twobp
