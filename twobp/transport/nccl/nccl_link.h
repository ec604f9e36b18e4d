// One direction between two ranks: a communicator of the two ranks. By the rules of NCCL and of streams, transfers
// arrive in the order in which they were launched.
#pragma once

#include "twobp/transport/nccl/nccl_communicator.h"
#include "twobp/transport/transport.h"

namespace twobp {

// For the kernels of a link. Left alone, NCCL may take 32 of an H100's 132 multiprocessors, and a rank in the middle of
// a pipeline has four links.
inline constexpr int kNcclLinkCtas = 2;

class NcclLink : public NcclCommunicator {
 public:
  NcclLink(const NcclApi& api, const DeviceStream& stream, const NcclUniqueId& id, bool sender,
           const std::string& name);

  // Launches the sending of the tensors' memory in the stream, which waits for those that the device has not made yet.
  // The link keeps them until they are sent.
  void send(Values values, const Tag& tag);
  // The same for memory to receive into, which was allocated for stream(). The event passes when the memory has been
  // written.
  DeviceEvent receive(const Values& values, const Tag& tag);

 private:
  void first_calls(at::Device memory, double deadline) override;
  void put(const at::Tensor& tensor, double deadline);

  bool sender_;
};

// The head of a message whose tensors travel by NCCL. It is sent ahead over the host transport, in the form of tensors.
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
