#include "twobp/transport/nccl/nccl_link.h"

#include <chrono>
#include <thread>

#include "twobp/core/awake_clock.h"
#include "twobp/core/check.h"
#include "twobp/core/clock.h"

namespace twobp {
namespace {

constexpr double kCallSeconds = 30;  // seconds for a call that only launches work

}  // namespace

NcclLink::NcclLink(const NcclApi& api, const Device& device, const DeviceStream& stream,
                   const NcclUniqueId& id, bool sender, std::string name)
    : api_(api), device_(device), sender_(sender), name_(std::move(name)), stream_(stream) {
  const OnStream here(stream_);  // NCCL uses the current device
  NcclConfig config;
  config.min_ctas = 1;
  config.max_ctas = kNcclMostCtas;
  // Rank 0 of the two sends.
  const int result = api_.init_rank(&comm_, 2, id, sender ? 0 : 1, &config);
  if (result != NcclApi::kInProgress) check(result, "ncclCommInitRankConfig", 0);
}

NcclLink::~NcclLink() {
  if (!comm_ || freed_) return;
  (finalized_ ? api_.destroy : api_.abort)(comm_);
}

void NcclLink::finalize() {
  const int result = api_.finalize(comm_);
  if (result != NcclApi::kInProgress) check(result, "ncclCommFinalize", 0);
}

bool NcclLink::finalized() {
  int error = NcclApi::kInProgress;
  if (!finalized_) finalized_ = api_.get_async_error(comm_, &error) == 0 && error == NcclApi::kSuccess;
  return finalized_;
}

void NcclLink::check(int result, const char* what, double deadline) {
  const double begin = now_seconds();
  while (result == NcclApi::kInProgress) {
    if (aborted_) throw Aborted(concat("NCCL from ", name_, ": ", what, " was given up"));
    const int asked = api_.get_async_error(comm_, &result);
    if (asked != NcclApi::kSuccess) result = asked;
    if (result != NcclApi::kInProgress) break;
    TWOBP_CHECK(awake_seconds() < deadline, "NCCL from ", name_, ": ", what,
                " is not done in time: the other rank is stuck, or the network between their GPUs does not "
                "work (NCCL_DEBUG=INFO shows more)");
    if (look_around_) look_around_();
    if (now_seconds() > begin + kNcclSpinSeconds) std::this_thread::sleep_for(kNcclPause);
  }
  TWOBP_CHECK(result == NcclApi::kSuccess, "NCCL from ", name_, ": ", what, ": ", api_.error_text(result),
              " (NCCL_DEBUG=INFO shows more)");
}

void NcclLink::connect(at::Device memory, double deadline, const std::function<void()>& look_around) {
  const OnStream here(stream_);
  look_around_ = look_around;
  check(NcclApi::kInProgress, "the connection", deadline);
  const auto place = at::TensorOptions(at::kByte).device(memory);
  const at::Tensor byte = sender_ ? at::zeros({1}, place) : at::empty({1}, place);
  put(byte, deadline);
  transfers_.push_back({{byte}, stream_.record(), awake_seconds(), {}});
  while (under_way() > 0) {
    check(NcclApi::kInProgress, "the first byte", deadline);
    TWOBP_CHECK(awake_seconds() < deadline, "NCCL from ", name_, ": the first byte has not arrived in time");
    look_around_();
    std::this_thread::sleep_for(kNcclPause);
  }
  look_around_ = nullptr;
}

void NcclLink::put(const at::Tensor& tensor, double deadline) {
  if (aborted_) throw Aborted(concat("NCCL from ", name_, " was aborted"));
  const size_t bytes = tensor.nbytes();
  if (bytes == 0) return;
  void* stream = stream_.native();
  const int result = sender_
                         ? api_.send(tensor.const_data_ptr(), bytes, NcclApi::kByte, 1, comm_, stream)
                         : api_.receive(tensor.mutable_data_ptr(), bytes, NcclApi::kByte, 0, comm_, stream);
  check(result, sender_ ? "ncclSend" : "ncclRecv", deadline);
}

void NcclLink::send(Values values, const Tag& tag) {
  const OnStream here(stream_);
  const double begin = awake_seconds();
  for (const at::Tensor& value : values) put(value, begin + kCallSeconds);
  transfers_.push_back({std::move(values), stream_.record(), begin, tag});
}

DeviceEvent NcclLink::receive(const Values& values, const Tag& tag) {
  const OnStream here(stream_);
  const double begin = awake_seconds();
  for (const at::Tensor& value : values) put(value, begin + kCallSeconds);
  const DeviceEvent done = stream_.record();
  // The memory belongs to this stream, so that it is reused in the stream's order.
  transfers_.push_back({{}, done, begin, tag});
  return done;
}

size_t NcclLink::under_way() {
  while (!transfers_.empty() && transfers_.front().done.passed()) transfers_.pop_front();
  return transfers_.size();
}

std::string NcclLink::trouble(double timeout) {
  if (!comm_ || aborted_) return {};
  int error = NcclApi::kSuccess;
  const int asked = api_.get_async_error(comm_, &error);
  if (asked != NcclApi::kSuccess) error = asked;
  if (error != NcclApi::kSuccess && error != NcclApi::kInProgress)
    return concat("NCCL from ", name_, ": ", api_.error_text(error), " (NCCL_DEBUG=INFO shows more)");
  if (transfers_.empty() || awake_seconds() < transfers_.front().begin + timeout) return {};
  if (transfers_.front().done.passed()) return {};
  return concat("NCCL from ", name_, ": ", to_string(transfers_.front().tag), " has not arrived in ", timeout,
                " s: one of the two ranks is stuck or the time-out (pipeline.timeout) is too short");
}

void NcclLink::abort() {
  interrupt();
  if (comm_ && !freed_.exchange(true)) api_.abort(comm_);
}

}  // namespace twobp
