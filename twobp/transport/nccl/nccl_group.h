// Some ranks that sum tensors together: a communicator of all of them.
#pragma once

#include <functional>
#include <vector>

#include "twobp/transport/nccl/nccl_communicator.h"

namespace twobp {

// For the kernels of a group. More are faster between the GPUs of a machine, but F and I lack the multiprocessors, also
// while a kernel waits for a slower replica. Not measured.
inline constexpr int kNcclGroupCtas = 8;

class NcclGroup : public NcclCommunicator {
 public:
  // `members`: the ranks, in their order in the group. `place`: this rank's in it.
  NcclGroup(const NcclApi& api, const DeviceStream& stream, const NcclUniqueId& id, const std::vector<int>& members,
            int place);

  // As those of GroupSums. `ready`: passes when the device has made the tensors. `seconds`: the most that NCCL may take
  // to launch them.
  DeviceEvent all_reduce(const at::Tensor& tensor, const DeviceEvent& ready, double seconds = kCallSeconds);
  DeviceEvent reduce(const std::vector<at::Tensor>& tensors, const std::vector<int>& owners, const DeviceEvent& ready,
                     double seconds = kCallSeconds);
  DeviceEvent broadcast(const std::vector<at::Tensor>& tensors, const std::vector<int>& roots, const DeviceEvent& ready,
                        double seconds = kCallSeconds);

 private:
  void first_calls(at::Device memory, double deadline) override;
  // `call(i, data, stream)` is the NCCL call for tensor i.
  DeviceEvent launch(const std::vector<at::Tensor>& tensors, const DeviceEvent& ready, const char* what,
                     MessageKind kind, double seconds,
                     const std::function<int(size_t i, void* data, void* stream)>& call);
};

}  // namespace twobp
