#include "twobp/pipeline/p2_stream.h"

namespace twobp {
namespace {

// Enough that the stream does not run dry while the host puts in an F.
constexpr size_t kAhead = 16;

}  // namespace

void P2Stream::begin(std::span<const DeviceEvent> ready, std::span<Saved* const> saved) {
  if (!records_) forget_passed();
  for (const DeviceEvent& event : ready) device_.weights().wait(event);
  for (const Saved* one : saved) {
    one->visit_p2([&](const at::Tensor& tensor) { device_.weights().uses(tensor); });
  }
}

bool P2Stream::has_room() {
  if (records_) return true;
  forget_passed();
  return under_way_.size() < kAhead;
}

void P2Stream::forget_passed() {
  while (!under_way_.empty() && under_way_.front().passed()) under_way_.pop_front();
}

}  // namespace twobp
