// The loop's weight gradients: what its queue gives is run here.
#include <algorithm>

#include <ATen/record_function.h>

#include "twobp/core/text.h"
#include "twobp/pipeline/executor/step_loop.h"
#include "twobp/pipeline/stage.h"

namespace twobp {

bool StepLoop::run_w(const std::optional<WUnits>& units, int first, int last) {
  if (!units) return false;
  for (WUnits one = *units; one.first < units->first + units->count; ++one.first) {
    one.count = 1;
    if (plan_.options.batching == P2Batching::kLoop) {
      run_unit({&one, 1});
    } else {
      std::vector<WUnits> together = queue_.take_same(one, first, last);
      together.insert(together.begin(), one);
      run_unit(together);
    }
  }
  return true;
}

void StepLoop::run_unit(std::span<const WUnits> together) {
  if (skips()) return;
  RECORD_USER_SCOPE("W");
  observer_.w_begins();
  std::vector<Saved*> saved;
  for (const WUnits& units : together) saved.push_back(made(units).unit.saved);
  const WUnits& first = together.front();
  const int s = local(first.stage);
  const MadeUnit& unit = made(first);
  const MemoryMeter::Scope scope(first.stage, MemoryCategory::kStash);
  naming_layer([&] { return concat(parts_.place_of(stage(s), unit.layer), ", W of micro-batch ", first.micro_batch); },
               [&] { unit.unit.layer->backward_p2(saved); });
  for (Saved* one : saved) one->release_p2();
  if (!work_.empty()) {
    work_[s][unit.layer].p2 -= static_cast<int>(together.size());
    check_done(s, unit.layer);
  }
  parts_.progress();
  observer_.w_ends(unit, together);
}

void StepLoop::run_w_by_layer(int stage, int units) {
  queue_.take_by_layer(stage, units, [&](const WUnits& one) { run_w(one); });
}

void StepLoop::flush_w(int s, int first, int last) {
  const int stage = this->stage(s).index();
  for (int mb = first; mb < last; ++mb) {
    if (plan_.options.batching == P2Batching::kLoop) {
      run_w(queue_.take_rest(stage, mb));
    } else {
      while (run_w(queue_.take_next(stage, mb), first, last)) continue;
    }
  }
}

void StepLoop::check_done(int s, int layer) {
  const LayerWork& work = work_[s][layer];
  if (work.p1 != 0 || work.p2 != 0) return;
  parts_.expect_gradients(stage(s), layer, request_);
  parts_.reducer->layer_done(stage(s).index(), layer);
}

bool StepLoop::lacks_room(double need) const {
  return twobp::lacks_room(static_cast<double>(parts_.meter.held(parts_.rank)), need,
                           static_cast<double>(plan_.cap(parts_.rank)));
}

void StepLoop::make_room(double peak, double held) {
  const double need = std::max(peak, held + largest_w_);
  const auto lacks = [&] { return !queue_.empty() && lacks_room(need); };
  if (!lacks()) return;
  interrupt([&] {
    while (lacks()) run_w(queue_.take_oldest());
  });
}

}  // namespace twobp
