#include "twobp/transport/nccl/nccl_communicator.h"

#include <algorithm>
#include <thread>

#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/transport/message.h"

namespace twobp {

NcclCommunicator::NcclCommunicator(const NcclApi& api, const DeviceStream& stream, const NcclUniqueId& id,
                                   const Place& place, std::string name)
    : api_(api), name_(std::move(name)), stream_(stream) {
  const OnStream here(stream_);  // NCCL uses the current device
  NcclConfig config;
  config.min_ctas = 1;
  config.max_ctas = place.most_ctas;
  const int result = api_.init_rank(&comm_, place.ranks, id, place.rank, &config);
  if (result != NcclApi::kInProgress) check(result, "ncclCommInitRankConfig", 0);
}

NcclCommunicator::~NcclCommunicator() {
  if (!comm_ || freed_) return;
  (finalized_ ? api_.destroy : api_.abort)(comm_);
}

void NcclCommunicator::finalize() {
  const int result = api_.finalize(comm_);
  if (result != NcclApi::kInProgress) check(result, "ncclCommFinalize", 0);
}

bool NcclCommunicator::finalized() {
  int error = NcclApi::kInProgress;
  if (!finalized_) finalized_ = api_.get_async_error(comm_, &error) == 0 && error == NcclApi::kSuccess;
  return finalized_;
}

void NcclCommunicator::check_usable() const {
  if (aborted_) throw Aborted(concat(name_, " was aborted"));
}

void NcclCommunicator::check(int result, const char* what, double deadline) {
  const double begin = now_seconds();
  while (result == NcclApi::kInProgress) {
    if (aborted_) throw Aborted(concat(name_, ": ", what, " was given up"));
    const int asked = api_.get_async_error(comm_, &result);
    if (asked != NcclApi::kSuccess) result = asked;
    if (result != NcclApi::kInProgress) break;
    TWOBP_CHECK(awake_seconds() < deadline, name_, ": ", what,
                " is not done in time: another rank is stuck, or the network between their GPUs does not "
                "work (NCCL_DEBUG=INFO shows more)");
    if (look_around_) look_around_();
    if (now_seconds() > begin + kNcclSpinSeconds) std::this_thread::sleep_for(kNcclPause);
  }
  TWOBP_CHECK(result == NcclApi::kSuccess, name_, ": ", what, ": ", api_.error_text(result),
              " (NCCL_DEBUG=INFO shows more)");
}

void NcclCommunicator::connect(at::Device memory, double deadline, const std::function<void()>& look_around) {
  const OnStream here(stream_);
  look_around_ = look_around;
  check(NcclApi::kInProgress, "the connection", deadline);
  first_calls(memory, deadline);
  while (under_way() > 0) {
    check(NcclApi::kInProgress, "the first number", deadline);
    TWOBP_CHECK(awake_seconds() < deadline, name_, ": the first number has not arrived in time");
    look_around_();
    std::this_thread::sleep_for(kNcclPause);
  }
  look_around_ = nullptr;
}

DeviceEvent NcclCommunicator::launched(Values values, double begin, const Tag& tag) {
  DeviceEvent done = stream_.record();
  const std::lock_guard lock(state_);
  calls_.push_back({std::move(values), done, begin, tag});
  return done;
}

size_t NcclCommunicator::under_way() {
  std::deque<Call> done;  // their tensors are freed without the lock
  const std::lock_guard lock(state_);
  for (; !calls_.empty() && calls_.front().done.passed(); calls_.pop_front()) done.push_back(std::move(calls_.front()));
  return calls_.size();
}

std::string NcclCommunicator::trouble(double timeout) {
  const std::lock_guard lock(state_);
  if (!comm_ || aborted_) return {};
  int error = NcclApi::kSuccess;
  const int asked = api_.get_async_error(comm_, &error);
  if (asked != NcclApi::kSuccess) error = asked;
  if (error != NcclApi::kSuccess && error != NcclApi::kInProgress)
    return concat(name_, ": ", api_.error_text(error), " (NCCL_DEBUG=INFO shows more)");
  // What has passed is left to under_way(), whose caller's meter counts its memory.
  const auto call = std::ranges::find_if(calls_, [](const Call& one) { return !one.done.passed(); });
  if (call == calls_.end() || awake_seconds() < call->begin + timeout) return {};
  return concat(name_, ": ", to_string(call->tag), " has not arrived in ", timeout,
                " s: one of these ranks is stuck or the time-out (pipeline.timeout) is too short");
}

void NcclCommunicator::abort() {
  interrupt();
  const std::lock_guard lock(state_);
  if (comm_ && !freed_.exchange(true)) api_.abort(comm_);
}

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
