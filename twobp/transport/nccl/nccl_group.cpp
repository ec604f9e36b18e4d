#include "twobp/transport/nccl/nccl_group.h"

#include "twobp/core/awake_clock.h"
#include "twobp/core/check.h"
#include "twobp/core/text.h"

namespace twobp {
namespace {

std::string name_of(const std::vector<int>& members) {
  constexpr size_t kMostNamed = 8;
  std::vector<std::string> names;
  for (size_t i = 0; i < members.size() && i < kMostNamed; ++i) names.push_back(std::to_string(members[i]));
  return concat("NCCL among ranks ", join(names), members.size() > kMostNamed ? " ..." : "");
}

int type_of(const at::Tensor& tensor) {
  return *nccl_type(tensor.scalar_type());
}

}  // namespace

NcclGroup::NcclGroup(const NcclApi& api, const DeviceStream& stream, const NcclUniqueId& id,
                     const std::vector<int>& members, int place)
    : NcclCommunicator(api, stream, id, {static_cast<int>(members.size()), place, kNcclGroupCtas},
                       name_of(members)) {}

void NcclGroup::first_call(at::Device memory, double deadline) {
  const at::Tensor number = at::zeros({1}, at::TensorOptions(at::kFloat).device(memory));
  const int result = api().all_reduce(number.const_data_ptr(), number.mutable_data_ptr(), 1, type_of(number),
                                      NcclApi::kSum, comm(), stream().native());
  check(result, "ncclAllReduce", deadline);
  launched({number}, awake_seconds(), {.kind = MessageKind::kSum});
}

DeviceEvent NcclGroup::launch(const at::Tensor& tensor, const DeviceEvent& ready, const char* what,
                              const std::function<int(void* data, void* stream)>& call) {
  check_usable();
  const OnStream here(stream());
  const double begin = awake_seconds();
  stream().wait(ready);
  check(call(tensor.mutable_data_ptr(), stream().native()), what, begin + kCallSeconds);
  return launched({tensor}, begin, {.kind = MessageKind::kSum});
}

DeviceEvent NcclGroup::all_reduce(const at::Tensor& tensor, const DeviceEvent& ready) {
  return launch(tensor, ready, "ncclAllReduce", [&](void* data, void* stream) {
    return api().all_reduce(data, data, tensor.numel(), type_of(tensor), NcclApi::kSum, comm(), stream);
  });
}

DeviceEvent NcclGroup::reduce(const at::Tensor& tensor, int owner, const DeviceEvent& ready) {
  return launch(tensor, ready, "ncclReduce", [&](void* data, void* stream) {
    return api().reduce(data, data, tensor.numel(), type_of(tensor), NcclApi::kSum, owner, comm(), stream);
  });
}

DeviceEvent NcclGroup::broadcast(const at::Tensor& tensor, int root, const DeviceEvent& ready) {
  return launch(tensor, ready, "ncclBroadcast", [&](void* data, void* stream) {
    return api().broadcast(data, data, tensor.numel(), type_of(tensor), root, comm(), stream);
  });
}

}  // namespace twobp
