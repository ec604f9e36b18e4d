// One direction between two ranks: a communicator of the two ranks. By the rules of NCCL and of streams, transfers
// arrive in the order in which they were launched.
#pragma once

#include "twobp/transport/nccl/nccl_communicator.h"

namespace twobp {

// For the kernels of a link. Left alone, NCCL may take 32 of an H100's 132 multiprocessors, and a rank in the middle of
// a pipeline has four links.
inline constexpr int kNcclLinkCtas = 2;

class NcclLink : public NcclCommunicator {
 public:
  NcclLink(const NcclApi& api, const DeviceStream& stream, const NcclUniqueId& id, bool sender,
           const std::string& name);

  // Launches the sending of the tensors' memory in the stream. The device must have made the tensors already. The link
  // keeps them until they are sent.
  void send(Values values, const Tag& tag);
  // The same for memory to receive into, which was allocated for stream(). The event passes when the memory has been
  // written.
  DeviceEvent receive(const Values& values, const Tag& tag);

 private:
  void first_calls(at::Device memory, double deadline) override;
  void put(const at::Tensor& tensor, double deadline);

  bool sender_;
};

}  // namespace twobp
