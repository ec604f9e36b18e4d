// A message as bytes, for transports between processes. A head describes the message and contains small tensors. The
// memory of large tensors is sent separately. Data from a peer is checked before it is used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "twobp/transport/receive_memory.h"
#include "twobp/transport/transport.h"

namespace twobp {

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

// The tensors lie in a CPU's memory.
OutgoingMessage pack_message(const Tag& tag, int64_t number, const Values& values);
std::vector<std::byte> pack_abort(const std::string& reason);

// Throws Error that says what is wrong and who sent the message. `memory` provides the tensors that are sent
// separately; with null, they are newly allocated.
IncomingMessage unpack_message(std::span<const std::byte> head, int from, ReceiveMemory* memory = nullptr);

}  // namespace twobp
