// A message as bytes, for transports between processes, memory for it, and the errors if it does not come. A head
// describes the message and contains small tensors. The memory of large tensors is sent separately. Data from a peer is
// checked before it is used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "twobp/core/check.h"
#include "twobp/core/wait.h"
#include "twobp/transport/transport.h"

namespace twobp {

// Memory for tensors that come from other processes. The last few blocks are reused, because fresh pages cost as much
// as the copy into them.
class ReceiveMemory {
 public:
  // Keeps blocks of up to this many bytes in total.
  explicit ReceiveMemory(int64_t most_kept = 64 << 20);

  // Returns an uninitialized host tensor. Its memory is reported to LibTorch's memory profiling as usual, but kept
  // blocks are not. The tensor may outlive this object and be released by any thread.
  at::Tensor allocate(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type);

  int64_t kept_bytes() const;

 private:
  struct Kept;
  struct Block;
  std::shared_ptr<Kept> kept_;
};

// Tensors of up to this many bytes are part of the head, so that a small message is sent as one.
constexpr int64_t kMostInlineBytes = 3072;
// The longest head that is accepted.
constexpr int64_t kMostHeadBytes = 1 << 20;

struct OutgoingMessage {
  std::vector<std::byte> head;
  // The tensors that are sent separately, in their order in the message. Each covers its memory without gaps.
  std::vector<at::Tensor> apart;
};

struct IncomingMessage {
  bool is_abort = false;
  std::string reason;  // of an abort
  Tag tag;
  int64_t number = 0;  // counts the sender's messages to this rank
  Values values;
  std::vector<at::Tensor> apart;  // allocated tensors of `values`; the caller receives into their memory
};

// The tensors as they travel: each covers its memory without gaps.
Values dense(Values values);
// Of such tensors. None if one is undefined or empty: then there may be nothing to send but a head.
std::optional<Forms> forms_of(const Values& values);

// A number that tells the expected messages between two ranks apart that may be under way together, from 0. None if
// there are more than `numbers`: then the message travels with its head. Both ends agree on it.
std::optional<int> number_of_expected(const Tag& tag, int64_t numbers);

// The tensors lie in a CPU's memory.
OutgoingMessage pack_message(const Tag& tag, int64_t number, const Values& values);
std::vector<std::byte> pack_abort(const std::string& reason);

// Throws Error that says what is wrong and who sent the message. `memory` provides the tensors that are sent
// separately; with null, they are newly allocated.
IncomingMessage unpack_message(std::span<const std::byte> head, int from, ReceiveMemory* memory = nullptr);

// A message that this rank waits for.
class MessageWait : public Wait {
 public:
  MessageWait(Transport& transport, int from, const Tag& tag, WaitCause cause = WaitCause::kMessage)
      : transport_(transport), from_(from), tag_(tag), cause_(cause) {}

  WaitCause cause() const override { return cause_; }
  bool ready() override { return there_ = there_ || transport_.try_receive(from_, tag_, values); }
  void block(double seconds) override;
  [[noreturn]] void fail(double timeout) const override;

  Values values;

 private:
  Transport& transport_;
  int from_;
  Tag tag_;
  WaitCause cause_;
  bool there_ = false;
};

// The errors of a transport when a wait takes too long, with the same text for every transport.

// "rank 3", "ranks 0, 1, 2", and of many the first ones and the number of the others. `ranks` is not empty.
std::string names_of_ranks(const std::vector<int>& ranks);

class TimedOut : public Error {
 public:
  using Error::Error;
};

// Throws TimedOut: `rank` waited `timeout` seconds for the message `tag` from rank `from`.
[[noreturn]] void fail_waiting(int rank, double timeout, const Tag& tag, int from);
// Throws Error: `rank` waited `timeout` seconds for a sum over `ranks`.
[[noreturn]] void fail_summing(int rank, double timeout, const std::vector<int>& ranks);
// Throws Error: rank `to` did not take a message of `rank` within `timeout` seconds.
[[noreturn]] void fail_sending(int rank, double timeout, int to);

}  // namespace twobp
