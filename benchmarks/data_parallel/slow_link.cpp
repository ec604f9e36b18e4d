#include "benchmarks/data_parallel/slow_link.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "twobp/core/measure.h"

namespace twobp {

SlowLink::SlowLink(std::unique_ptr<Transport> inner, double latency, double bytes_per_second)
    : inner_(std::move(inner)), latency_(latency), bytes_per_second_(bytes_per_second), free_at_(inner_->size(), 0.0) {}

void SlowLink::set_speed(double latency, double bytes_per_second) {
  latency_ = latency;
  bytes_per_second_ = bytes_per_second;
}

void SlowLink::isend(int to, const Tag& tag, Values values) {
  double bytes = 0;
  for (const at::Tensor& tensor : values) bytes += static_cast<double>(tensor.nbytes());
  sent_bytes_ += bytes;
  double& free_at = free_at_[to];
  free_at = std::max(free_at, now_seconds()) + (bytes_per_second_ > 0 ? bytes / bytes_per_second_ : 0);
  values.push_back(at::scalar_tensor(free_at + latency_, at::kDouble));  // the arrival time
  inner_->isend(to, tag, std::move(values));
}

SlowLink::Early* SlowLink::find(int from, const Tag& tag) {
  const auto known = std::find_if(early_.begin(), early_.end(),
                                  [&](const Early& early) { return early.from == from && early.tag == tag; });
  if (known != early_.end()) return &*known;
  Values values;
  if (!inner_->try_receive(from, tag, values)) return nullptr;
  const double arrives = values.back().item<double>();
  values.pop_back();
  early_.push_back({from, tag, std::move(values), arrives});
  return &early_.back();
}

bool SlowLink::try_receive(int from, const Tag& tag, Values& values) {
  Early* early = find(from, tag);
  if (early == nullptr || early->arrives > now_seconds()) return false;
  values = std::move(early->values);
  early_.erase(early_.begin() + (early - early_.data()));
  return true;
}

Values SlowLink::receive(int from, const Tag& tag, double timeout) {
  const double deadline = now_seconds() + timeout;
  Values values;
  while (!try_receive(from, tag, values)) {
    Early* early = find(from, tag);
    if (early == nullptr) {
      values = inner_->receive(from, tag, std::max(deadline - now_seconds(), 1e-3));
      const double arrives = values.back().item<double>();
      values.pop_back();
      early_.push_back({from, tag, std::move(values), arrives});
      values.clear();
      continue;
    }
    const double wait = std::min(early->arrives, deadline) - now_seconds();
    if (wait > 0) std::this_thread::sleep_for(std::chrono::duration<double>(wait));
    // After the deadline, the inner transport reports which rank waited for which message.
    if (now_seconds() > deadline && early->arrives > deadline) return inner_->receive(from, tag, 1e-3);
  }
  return values;
}

}  // namespace twobp
