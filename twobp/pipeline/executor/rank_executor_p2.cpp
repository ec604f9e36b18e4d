// The executor's weight gradients: which pending W runs when, and what follows after it.
#include <algorithm>

#include <ATen/record_function.h>

#include "twobp/core/clock.h"
#include "twobp/pipeline/executor/rank_executor.h"
#include "twobp/pipeline/layer_error.h"

namespace twobp {

void RankExecutor::run_p2(std::span<PendingP2> together) {
  if (skips()) return;
  RECORD_USER_SCOPE("W");
  const double begin = now_seconds();
  const ProductTime products = product_time();
  batch_.clear();
  for (const PendingP2& pending : together) batch_.push_back(pending.unit.saved);
  const PendingP2& first = together.front();
  const MemoryMeter::Scope scope(stages_[first.stage]->index(), MemoryCategory::kStash);
  const DeviceEvent device_begin = device_times_.begin_p2();
  naming_layer(
      [&] { return concat(place_of(first.stage, first.layer), ", W of micro-batch ", first.micro_batch); },
      [&] { first.unit.layer->backward_p2(batch_); });
  device_times_.end_p2(first.stage, device_begin);
  p2_run_ += static_cast<int>(together.size());
  for (Saved* saved : batch_) saved->release_p2();
  if (!work_.empty()) {
    work_[first.stage][first.layer].p2 -= static_cast<int>(together.size());
    check_done(first.stage, first.layer);
  }
  progress();
  const double end = now_seconds();
  stage_times_[first.stage].backward_p2 += end - begin;
  stage_times_[first.stage].p2_products += product_time() - products;
  if (events_.on()) log_p2(together, begin, end);
}

void RankExecutor::run_oldest_p2() {
  together_.clear();
  if (input_->batching == P2Batching::kLoop) {
    together_.push_back(pending_.front());
    pending_.pop_front();
  } else {
    const Layer* layer = pending_.front().unit.layer;
    std::copy_if(pending_.begin(), pending_.end(), std::back_inserter(together_),
                 [&](const PendingP2& pending) { return pending.unit.layer == layer; });
    std::erase_if(pending_, [&](const PendingP2& pending) { return pending.unit.layer == layer; });
  }
  run_p2(together_);
}

void RankExecutor::run_filling_p2() {
  if (!work_.empty() && input_->p2_order == P2Order::kBucket) {
    const auto sooner = [&](const PendingP2& a, const PendingP2& b) {
      const bool a_ended = work_[a.stage][a.layer].p1 == 0;
      const bool b_ended = work_[b.stage][b.layer].p1 == 0;
      return a_ended && b_ended ? bucket_order(a) < bucket_order(b) : a_ended && !b_ended;
    };
    const auto first = std::min_element(pending_.begin(), pending_.end(), sooner);
    std::rotate(pending_.begin(), first, first + 1);
  }
  run_oldest_p2();
}

void RankExecutor::run_placed_p2() {
  if (input_->p2_places.empty()) return;
  while (!pending_.empty() && p2_run_ < input_->p2_places[rank_][at_]) run_filling_p2();
}

void RankExecutor::find_tail() {
  const auto& list = input_->schedule->ranks[rank_];
  tail_ = last_p1_ = list.size();
  while (tail_ > 0 && list[tail_ - 1].op == Op::kBackwardP2) --tail_;
  if (!input_->training || input_->p2_order != P2Order::kBucket || tail_ == 0) return;
  const Instruction& before = list[tail_ - 1];
  const Stage& stage = *stages_[local(before.stage)];
  if (before.op == Op::kBackwardP1 && before.count == 1 && !stage.gives_gradient()) last_p1_ = tail_ - 1;
}

std::tuple<int, int, int> RankExecutor::bucket_order(const PendingP2& pending) {
  return {-pending.stage, -pending.layer, pending.leaf};
}

void RankExecutor::run_p2_by_layer(int s, int layer) {
  // A stable sort keeps the micro-batches of a leaf in order.
  std::stable_sort(pending_.begin(), pending_.end(),
                   [](const PendingP2& a, const PendingP2& b) { return bucket_order(a) < bucket_order(b); });
  while (!pending_.empty()) {
    const PendingP2& next = pending_.front();
    if (next.stage < s || (next.stage == s && next.layer < layer)) return;
    run_oldest_p2();
  }
}

void RankExecutor::run_tail_p2() {
  if (input_->training && input_->p2_order == P2Order::kBucket) run_p2_by_layer(0, 0);
}

void RankExecutor::flush_p2(int s, int first, int last) {
  const auto due = [&](const PendingP2& pending) {
    return pending.stage == s && pending.micro_batch >= first && pending.micro_batch < last;
  };
  if (input_->batching != P2Batching::kLoop) {
    // Layer by layer: all due micro-batches of a layer at once.
    while (true) {
      const auto oldest = std::find_if(pending_.begin(), pending_.end(), due);
      if (oldest == pending_.end()) return;
      const Layer* layer = oldest->unit.layer;
      const auto same = [&](const PendingP2& pending) { return pending.unit.layer == layer && due(pending); };
      together_.clear();
      std::copy_if(pending_.begin(), pending_.end(), std::back_inserter(together_), same);
      std::erase_if(pending_, same);
      run_p2(together_);
    }
  }
  // W of the rank's other stages may lie in between.
  for (auto it = pending_.begin(); it != pending_.end();) {
    if (!due(*it)) {
      ++it;
      continue;
    }
    PendingP2 pending = *it;
    it = pending_.erase(it);
    run_p2({&pending, 1});
  }
}

double RankExecutor::make_room(double peak, double held) {
  const int64_t bytes = std::max(static_cast<int64_t>(peak), static_cast<int64_t>(held) + largest_p2_);
  const auto lacks = [&] { return !pending_.empty() && meter_.held(rank_) + bytes > cap_; };
  if (!lacks()) return 0;
  const double begin = now_seconds();
  events_.pause(begin);
  device_times_.pause();
  while (lacks()) run_oldest_p2();
  device_times_.resume();
  const double end = now_seconds();
  events_.resume(end);
  return end - begin;
}

void RankExecutor::log_p2(std::span<PendingP2> together, double begin, double end) {
  const double each = (end - begin) / static_cast<double>(together.size());
  // A reordered schedule may concatenate micro-batches that are not successive. Each successive run becomes
  // an event.
  for (size_t i = 0, next = 0; i < together.size(); i = next) {
    const PendingP2& first = together[i];
    for (next = i + 1; next < together.size(); ++next) {
      if (together[next].micro_batch != together[next - 1].micro_batch + 1) break;
    }
    Event event;
    event.stage = stages_[first.stage]->index();
    event.micro_batch = first.micro_batch;
    event.count = static_cast<int>(next - i);
    event.layer = first.layer;
    event.unit = first.leaf;
    event.begin = begin + static_cast<double>(i) * each;
    event.end = next == together.size() ? end : begin + static_cast<double>(next) * each;
    events_.backward_p2(*first.unit.layer, stages_[first.stage]->layer_name(first.layer), std::move(event));
  }
}

}  // namespace twobp
