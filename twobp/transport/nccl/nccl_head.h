// The head of a message whose tensors travel by NCCL. It is sent ahead over the host transport, in the form of tensors.
#pragma once

#include "twobp/transport/transport.h"

namespace twobp {

struct PackedHead {
  Values head;       // numbers that describe the message, then the tensors that go with the head
  Values on_device;  // the other tensors, in order; each covers its memory without gaps
};

// Tensors on devices of type `by_nccl` are only described; the others are included. Work that makes a tensor dense is
// launched in the current stream. Without a link (`linked`), all are included, and the caller waits until they are
// copied to the host.
PackedHead pack_head(const Tag& tag, Values values, at::DeviceType by_nccl, bool linked = true);

struct ReceivedHead {
  Tag tag;
  Values values;               // undefined if a tensor is still to be received
  std::vector<int> on_device;  // indices of these tensors
  std::vector<int> by_host;    // of tensors that belong on the device and have come with the head
  // Allocates these tensors on `device`, and returns them. (In tests, where host tensors go by NCCL too, it allocates
  // them on the host.)
  Values allocate(at::Device device, at::DeviceType by_nccl);

  struct Shape {
    at::ScalarType type = at::kFloat;
    std::vector<int64_t> sizes, strides;
  };
  std::vector<Shape> shapes;  // of the tensors in on_device
};

// Throws Error that names the sender if the head is invalid.
ReceivedHead unpack_head(const Values& head, int from);

}  // namespace twobp
