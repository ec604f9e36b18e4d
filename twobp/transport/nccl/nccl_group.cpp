#include "twobp/transport/nccl/nccl_group.h"

#include "twobp/core/awake_clock.h"
#include "twobp/core/check.h"
#include "twobp/transport/time_out.h"

namespace twobp {
namespace {

int type_of(const at::Tensor& tensor) {
  return *nccl_type(tensor.scalar_type());
}

}  // namespace

NcclGroup::NcclGroup(const NcclApi& api, const DeviceStream& stream, const NcclUniqueId& id,
                     const std::vector<int>& members, int place)
    : NcclCommunicator(api, stream, id, {static_cast<int>(members.size()), place, kNcclGroupCtas},
                       concat("NCCL among ", names_of_ranks(members))) {}

void NcclGroup::first_calls(at::Device memory, double deadline) {
  const at::Tensor number = at::zeros({1}, at::TensorOptions(at::kFloat).device(memory));
  const double seconds = deadline - awake_seconds();
  all_reduce(number, {}, seconds);
  reduce({number}, {0}, {}, seconds);
  broadcast({number}, {0}, {}, seconds);
}

DeviceEvent NcclGroup::launch(const std::vector<at::Tensor>& tensors, const DeviceEvent& ready, const char* what,
                              MessageKind kind, double seconds,
                              const std::function<int(size_t i, void* data, void* stream)>& call) {
  check_usable();
  for (const at::Tensor& tensor : tensors)
    TWOBP_CHECK(nccl_type(tensor.scalar_type()) && tensor.is_non_overlapping_and_dense(), what,
                " takes dense tensors of numbers, not ", tensor.sizes(), " with strides ", tensor.strides(), " of ",
                toString(tensor.scalar_type()));
  const OnStream here(stream());
  const double begin = awake_seconds();
  stream().wait(ready);
  check(api().group_start(), "ncclGroupStart", begin + seconds);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int result = call(i, tensors[i].mutable_data_ptr(), stream().native());
    if (result != NcclApi::kInProgress) check(result, what, begin + seconds);
  }
  const int result = api().group_end();
  check(result, what, begin + seconds);
  return launched(Values(tensors.begin(), tensors.end()), begin, {.kind = kind});
}

DeviceEvent NcclGroup::all_reduce(const at::Tensor& tensor, const DeviceEvent& ready, double seconds) {
  return launch({tensor}, ready, "ncclAllReduce", MessageKind::kSum, seconds, [&](size_t, void* data, void* stream) {
    return api().all_reduce(data, data, tensor.numel(), type_of(tensor), NcclApi::kSum, comm(), stream);
  });
}

DeviceEvent NcclGroup::reduce(const std::vector<at::Tensor>& tensors, const std::vector<int>& owners,
                              const DeviceEvent& ready, double seconds) {
  return launch(tensors, ready, "ncclReduce", MessageKind::kSum, seconds, [&](size_t i, void* data, void* stream) {
    return api().reduce(data, data, tensors[i].numel(), type_of(tensors[i]), NcclApi::kSum, owners[i], comm(), stream);
  });
}

DeviceEvent NcclGroup::broadcast(const std::vector<at::Tensor>& tensors, const std::vector<int>& roots,
                                 const DeviceEvent& ready, double seconds) {
  return launch(tensors, ready, "ncclBroadcast", MessageKind::kWeights, seconds,
                [&](size_t i, void* data, void* stream) {
                  return api().broadcast(data, data, tensors[i].numel(), type_of(tensors[i]), roots[i], comm(), stream);
                });
}

}  // namespace twobp
