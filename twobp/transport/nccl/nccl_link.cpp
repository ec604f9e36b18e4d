#include "twobp/transport/nccl/nccl_link.h"

#include "twobp/core/awake_clock.h"
#include "twobp/core/check.h"

namespace twobp {

// Rank 0 of the two sends.
NcclLink::NcclLink(const NcclApi& api, const DeviceStream& stream, const NcclUniqueId& id, bool sender,
                   const std::string& name)
    : NcclCommunicator(api, stream, id, {2, sender ? 0 : 1, kNcclLinkCtas}, concat("NCCL from ", name)),
      sender_(sender) {}

void NcclLink::first_calls(at::Device memory, double deadline) {
  const auto place = at::TensorOptions(at::kByte).device(memory);
  const at::Tensor byte = sender_ ? at::zeros({1}, place) : at::empty({1}, place);
  put(byte, deadline);
  launched({byte}, awake_seconds(), {});
}

void NcclLink::put(const at::Tensor& tensor, double deadline) {
  check_usable();
  const size_t bytes = tensor.nbytes();
  if (bytes == 0) return;
  void* stream = this->stream().native();
  const int result = sender_ ? api().send(tensor.const_data_ptr(), bytes, NcclApi::kByte, 1, comm(), stream)
                             : api().receive(tensor.mutable_data_ptr(), bytes, NcclApi::kByte, 0, comm(), stream);
  check(result, sender_ ? "ncclSend" : "ncclRecv", deadline);
}

void NcclLink::send(Values values, const Tag& tag) {
  const OnStream here(stream());
  const double begin = awake_seconds();
  for (const at::Tensor& value : values) put(value, begin + kCallSeconds);
  launched(std::move(values), begin, tag);
}

DeviceEvent NcclLink::receive(const Values& values, const Tag& tag) {
  const OnStream here(stream());
  const double begin = awake_seconds();
  for (const at::Tensor& value : values) put(value, begin + kCallSeconds);
  // The memory belongs to this stream, so that it is reused in the stream's order. It need not be kept.
  return launched({}, begin, tag);
}

}  // namespace twobp
