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
  launch({number}, {}, "ncclAllReduce", MessageKind::kSum, seconds,
         [&](size_t) { return all_reduce(number); });
  launch({number}, {}, "ncclReduce", MessageKind::kSum, seconds, [&](size_t) { return reduce(number, 0); });
  launch({number}, {}, "ncclBroadcast", MessageKind::kWeights, seconds,
         [&](size_t) { return broadcast(number, 0); });
}

DeviceEvent NcclGroup::launch(const std::vector<at::Tensor>& tensors, const DeviceEvent& ready,
                              const char* what, MessageKind kind, double seconds,
                              const std::function<int(size_t i)>& call) {
  check_usable();
  for (const at::Tensor& tensor : tensors)
    TWOBP_CHECK(nccl_type(tensor.scalar_type()) && tensor.is_non_overlapping_and_dense(), what,
                " takes dense tensors of numbers, not ", tensor.sizes(), " with strides ", tensor.strides(),
                " of ", toString(tensor.scalar_type()));
  const OnStream here(stream());
  const double begin = awake_seconds();
  stream().wait(ready);
  check(api().group_start(), "ncclGroupStart", begin + seconds);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int result = call(i);
    if (result != NcclApi::kInProgress) check(result, what, begin + seconds);
  }
  const int result = api().group_end();
  check(result, what, begin + seconds);
  return launched(Values(tensors.begin(), tensors.end()), begin, {.kind = kind});
}

int NcclGroup::all_reduce(const at::Tensor& tensor) {
  void* const data = tensor.mutable_data_ptr();
  return api().all_reduce(data, data, tensor.numel(), type_of(tensor), NcclApi::kSum, comm(),
                          stream().native());
}

int NcclGroup::reduce(const at::Tensor& tensor, int owner) {
  void* const data = tensor.mutable_data_ptr();
  return api().reduce(data, data, tensor.numel(), type_of(tensor), NcclApi::kSum, owner, comm(),
                      stream().native());
}

int NcclGroup::broadcast(const at::Tensor& tensor, int root) {
  void* const data = tensor.mutable_data_ptr();
  return api().broadcast(data, data, tensor.numel(), type_of(tensor), root, comm(), stream().native());
}

DeviceEvent NcclGroup::all_reduce(const at::Tensor& tensor, const DeviceEvent& ready) {
  return launch({tensor}, ready, "ncclAllReduce", MessageKind::kSum, kCallSeconds,
                [&](size_t) { return all_reduce(tensor); });
}

DeviceEvent NcclGroup::reduce(const std::vector<at::Tensor>& tensors, const std::vector<int>& owners,
                              const DeviceEvent& ready) {
  return launch(tensors, ready, "ncclReduce", MessageKind::kSum, kCallSeconds,
                [&](size_t i) { return reduce(tensors[i], owners[i]); });
}

DeviceEvent NcclGroup::broadcast(const std::vector<at::Tensor>& tensors, const std::vector<int>& roots,
                                 const DeviceEvent& ready) {
  return launch(tensors, ready, "ncclBroadcast", MessageKind::kWeights, kCallSeconds,
                [&](size_t i) { return broadcast(tensors[i], roots[i]); });
}

}  // namespace twobp
