#include "twobp/pipeline/executor/p2_stream.h"

namespace twobp {
namespace {

// Enough that the stream does not run dry while the host launches an F.
constexpr size_t kAhead = 16;

}  // namespace

P2Stream::Recording::Recording(P2Stream& stream, const DeviceEvent& begin) : stream_(stream) {
  stream.device_.compute().wait(begin);
  stream.device_.weights().wait(begin);
  stream.records_ = true;
}

void P2Stream::begin(std::span<const DeviceEvent> ready, std::span<Saved* const> saved) {
  release_passed();
  for (const DeviceEvent& event : ready) device_.weights().wait(event);
  UnderWay& w = under_way_.emplace_back();
  for (const Saved* one : saved) {
    one->visit_p2([&](const at::Tensor& tensor) { w.kept.push_back(tensor); });
  }
}

void P2Stream::release_oldest() {
  device_.compute().wait(under_way_.front().end);
  under_way_.pop_front();
}

void P2Stream::join() {
  device_.compute().wait(device_.weights().record());
  under_way_.clear();
}

void P2Stream::give_up() {
  try {
    join();
  } catch (const c10::Error&) {
    under_way_.clear();
  }
}

bool P2Stream::has_room() {
  if (records_) return true;
  release_passed();
  return under_way_.size() < kAhead;
}

void P2Stream::release_passed() {
  while (!records_ && !under_way_.empty() && under_way_.front().end.passed()) under_way_.pop_front();
}

}  // namespace twobp
