// The head of a message whose tensors travel by NCCL: what goes ahead over the host transport, as tensors
// itself.
#pragma once

#include "twobp/transport/transport.h"

namespace twobp {

struct PackedHead {
  Values head;       // numbers about the message, then its tensors that go with the head
  Values on_device;  // the others, in order; each covers its memory without gaps
};

// Tensors on devices of type `by_nccl` are described, the others go along. Work that makes a tensor dense is
// put into the current stream.
PackedHead pack_head(const Tag& tag, Values values, at::DeviceType by_nccl);

struct ReceivedHead {
  Tag tag;
  Values values;               // undefined where a tensor is still to come
  std::vector<int> on_device;  // their places
  // Makes them, on `device` (or on the host, in tests, where those go by NCCL too), and gives them back.
  Values allocate(at::Device device, at::DeviceType by_nccl);

  struct Shape {
    at::ScalarType type = at::kFloat;
    std::vector<int64_t> sizes, strides;
  };
  std::vector<Shape> shapes;  // of those
};

// Throws Error that names the sender if it makes no sense.
ReceivedHead unpack_head(const Values& head, int from);

}  // namespace twobp
