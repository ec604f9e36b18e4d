// A message as bytes, for transports between processes: a head that says what follows, with small tensors in
// it; the memory of large ones travels apart. What comes from a peer is checked before anything is done
// with it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "twobp/transport/receive_memory.h"
#include "twobp/transport/transport.h"

namespace twobp {

// Tensors up to this many bytes travel in the head, so that a small message is one message.
constexpr int64_t kMostInlineBytes = 3072;
// Longest head that is accepted.
constexpr int64_t kMostHeadBytes = 1 << 20;

struct OutgoingMessage {
  std::vector<std::byte> head;
  // In the order of their place in the message; each covers its memory without gaps.
  std::vector<at::Tensor> apart;
};

struct IncomingMessage {
  bool is_abort = false;
  std::string reason;  // of an abort
  Tag tag;
  int64_t number = 0;  // of the sender's messages to this rank
  Values values;
  std::vector<at::Tensor> apart;  // of `values`, allocated; the caller receives into their memory
  std::vector<bool> on_device;    // by value: it was on a GPU where it came from
};

// `device_memory`: tensors on a GPU are sent and received from there; false: they are copied to the host
// first, and come as host tensors with `on_device` set.
OutgoingMessage pack_message(const Tag& tag, int64_t number, const Values& values, bool device_memory);
std::vector<std::byte> pack_abort(const std::string& reason);

// Throws Error that says what is wrong and whose message it was. `memory`: where host tensors that travel
// apart come from; null: freshly allocated.
IncomingMessage unpack_message(std::span<const std::byte> head, int from, bool device_memory,
                               ReceiveMemory* memory = nullptr);

}  // namespace twobp
