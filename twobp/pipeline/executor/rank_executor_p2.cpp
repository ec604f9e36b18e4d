// The executor's weight gradients: what its queue gives is run here.
#include <algorithm>

#include <ATen/record_function.h>

#include "twobp/core/clock.h"
#include "twobp/pipeline/executor/rank_executor.h"
#include "twobp/pipeline/layer_error.h"

namespace twobp {

void RankExecutor::prepare_w() {
  const Schedule& schedule = *input_->schedule;
  const P2Order order = input_->training ? input_->p2_order : P2Order::kOldest;
  const bool sums = reducer_ != nullptr && input_->training;
  queue_ =
      WQueue(schedule, rank_, {order, sums, input_->p2_places.empty() ? nullptr : &input_->p2_places[rank_]});
  std::vector<bool> gives_gradient(schedule.stages);
  for (const auto& stage : stages_) gives_gradient[stage->index()] = stage->gives_gradient();
  tail_ = w_tail(schedule.ranks[rank_], order, gives_gradient);
  made_.resize(stages_.size());
  for (auto& of_stage : made_) of_stage.resize(schedule.micro_batches);
}

bool RankExecutor::run_p2(const std::optional<WUnits>& units, int first, int last) {
  if (!units) return false;
  for (WUnits one = *units; one.first < units->first + units->count; ++one.first) {
    one.count = 1;
    if (input_->batching == P2Batching::kLoop) {
      run_unit({&one, 1});
    } else {
      std::vector<WUnits> together = queue_.take_same(one, first, last);
      together.insert(together.begin(), one);
      run_unit(together);
    }
  }
  return true;
}

void RankExecutor::run_unit(std::span<const WUnits> together) {
  if (skips()) return;
  RECORD_USER_SCOPE("W");
  const double begin = now_seconds();
  const ProductTime products = product_time();
  batch_.clear();
  for (const WUnits& units : together) batch_.push_back(made(units).unit.saved);
  const WUnits& first = together.front();
  const int s = local(first.stage);
  const MadeUnit& unit = made(first);
  const MemoryMeter::Scope scope(first.stage, MemoryCategory::kStash);
  const DeviceEvent device_begin = device_times_.begin_p2();
  naming_layer([&] { return concat(place_of(s, unit.layer), ", W of micro-batch ", first.micro_batch); },
               [&] { unit.unit.layer->backward_p2(batch_); });
  device_times_.end_p2(s, device_begin);
  for (Saved* saved : batch_) saved->release_p2();
  if (!work_.empty()) {
    work_[s][unit.layer].p2 -= static_cast<int>(together.size());
    check_done(s, unit.layer);
  }
  progress();
  const double end = now_seconds();
  stage_times_[s].backward_p2 += end - begin;
  stage_times_[s].p2_products += product_time() - products;
  if (events_.on()) log_p2(together, begin, end);
}

void RankExecutor::run_p2_by_layer(int stage, int units) {
  queue_.take_by_layer(stage, units, [&](const WUnits& one) { run_p2(one); });
}

void RankExecutor::flush_p2(int s, int first, int last) {
  const int stage = stages_[s]->index();
  for (int mb = first; mb < last; ++mb) {
    if (input_->batching == P2Batching::kLoop) {
      run_p2(queue_.take_rest(stage, mb));
    } else {
      while (run_p2(queue_.take_next(stage, mb), first, last)) continue;
    }
  }
}

bool RankExecutor::lacks_room(double need) const {
  return twobp::lacks_room(static_cast<double>(meter_.held(rank_)), need, static_cast<double>(cap_));
}

double RankExecutor::make_room(double peak, double held) {
  const double need = std::max(peak, held + static_cast<double>(largest_p2_));
  const auto lacks = [&] { return !queue_.empty() && lacks_room(need); };
  if (!lacks()) return 0;
  const double begin = now_seconds();
  events_.pause(begin);
  device_times_.pause();
  while (lacks()) run_p2(queue_.take_oldest());
  device_times_.resume();
  const double end = now_seconds();
  events_.resume(end);
  return end - begin;
}

void RankExecutor::log_p2(std::span<const WUnits> together, double begin, double end) {
  const double each = (end - begin) / static_cast<double>(together.size());
  // A reordered schedule may concatenate micro-batches that are not successive. Each successive run becomes
  // an event.
  for (size_t i = 0, next = 0; i < together.size(); i = next) {
    const WUnits& first = together[i];
    for (next = i + 1; next < together.size(); ++next) {
      if (together[next].micro_batch != together[next - 1].micro_batch + 1) break;
    }
    const MadeUnit& unit = made(first);
    Event event;
    event.stage = first.stage;
    event.micro_batch = first.micro_batch;
    event.count = static_cast<int>(next - i);
    event.layer = unit.layer;
    event.unit = unit.leaf;
    event.begin = begin + static_cast<double>(i) * each;
    event.end = next == together.size() ? end : begin + static_cast<double>(next) * each;
    events_.backward_p2(*unit.unit.layer, stages_[local(first.stage)]->layer_name(unit.layer),
                        std::move(event));
  }
}

}  // namespace twobp
