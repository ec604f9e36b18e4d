// The loop's weight gradients: what its queue gives is run here.
#include <algorithm>
#include <iterator>
#include <map>

#include <ATen/record_function.h>

#include "twobp/core/text.h"
#include "twobp/pipeline/executor/turns.h"
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
  if (streams(s)) {
    const MemoryMeter::Scope scope(first.stage, MemoryCategory::kGradients);
    for (Parameter* parameter : parameters_of(*unit.unit.layer)) {
      if (parameter->trainable()) parameter->grad_memory();
    }
  }
  const MemoryMeter::Scope scope(first.stage, MemoryCategory::kStash);
  for (Saved* one : saved) one->widen_p2();
  naming_layer([&] { return concat(parts_.place_of(stage(s), unit.layer), ", W of micro-batch ", first.micro_batch); },
               [&] { unit.unit.layer->backward_p2(saved); });
  for (Saved* one : saved) one->release_p2();
  parts_.progress();
  observer_.w_ends(unit, together);
  if (work_.empty()) return;
  for (const WUnits& units : together) --work_[s][unit.layer].p2[made(units).unit.layer];
  check_done(s, unit.layer, unit.unit.layer);
  apply_summed();
}

void StepLoop::run_w_by_layer(int stage, int units) {
  queue_.take_by_layer(stage, units, [&](const WUnits& one) {
    if (sums_streamed()) wait(*parts_.reducer->room());
    run_w(one);
  });
}

void StepLoop::sort_units(int s) {
  const auto streamed_bytes = [](const std::vector<Parameter*>& parameters) {
    size_t bytes = 0;
    for (const Parameter* one : parameters) bytes += one->streams_grad() ? 4 * static_cast<size_t>(one->numel()) : 0;
    return bytes;
  };
  std::map<const Layer*, size_t> known;
  const auto gradients = [&](const MadeUnit& made) {
    const auto [bytes, is_new] = known.try_emplace(made.unit.layer);
    if (is_new) {
      const bool whole = work_[s][made.layer].reads_weights();  // they are applied together
      bytes->second = streamed_bytes(whole ? stage(s).parameters(made.layer) : parameters_of(*made.unit.layer));
    }
    return bytes->second;
  };
  for (std::vector<MadeUnit>& units : made_[s]) std::ranges::stable_sort(units, {}, gradients);
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

void StepLoop::check_done(int s, int layer, Layer* leaf) {
  LayerWork& work = work_[s][layer];
  if (work.p1 != 0) return;
  if (streams(s)) {
    std::vector<Parameter*> parameters = complete(s, layer, leaf);
    parts_.expect_gradients(stage(s), layer, parameters, request_);
    // A stash of other W may be a view of the weight, which is updated at the end of the step then.
    std::erase_if(parameters, [&](const Parameter* one) {
      return !weights_.contains(one->value.storage().unsafeGetStorageImpl());
    });
    // From now on the step cannot be given up.
    if (parameters.empty() || (request_.early_end && !request_.early_end->completes())) return;
    std::ranges::copy(parameters, std::back_inserter(work.applied));
    if (!parts_.sums(request_)) return apply(parameters);
    for (const Parameter* parameter : parameters) parts_.reducer->gradient_done(*parameter);
    return apply_summed();
  }
  if (!parts_.sums(request_) || work.has_p2()) return;
  parts_.expect_gradients(stage(s), layer, stage(s).parameters(layer), request_);
  parts_.reducer->layer_done(stage(s).index(), layer);
}

std::vector<Parameter*> StepLoop::complete(int s, int layer, Layer* leaf) const {
  const LayerWork& work = work_[s][layer];
  std::vector<Parameter*> complete;
  const auto applied = [&](const Parameter* one) { return std::ranges::find(work.applied, one) != work.applied.end(); };
  if (!work.has_p2()) {
    std::ranges::remove_copy_if(parts_.stages[s]->parameters(layer), std::back_inserter(complete), applied);
    return complete;
  }
  if (leaf == nullptr || work.reads_weights() || work.p2.at(leaf) > 0) return complete;
  for (Parameter* parameter : parameters_of(*leaf)) {
    const bool open = std::ranges::any_of(work.p2, [&](const auto& other) {
      return other.second > 0 && std::ranges::count(parameters_of(*other.first), parameter) > 0;
    });
    if (!open && !applied(parameter)) complete.push_back(parameter);
  }
  return complete;
}

void StepLoop::apply(const std::vector<Parameter*>& parameters) {
  if (parameters.empty()) return;
  observer_.update_begins();
  request_.update->apply(parts_.rank, parameters);
  observer_.update_ends();
}

void StepLoop::apply_summed() {
  if (sums_streamed()) apply(parts_.reducer->take_summed());
}

void StepLoop::book_gradients(int s, const std::vector<Parameter*>& parameters) {
  for (const Parameter* parameter : parameters) {
    if (parameter->streams_grad() && parameter->has_grad())
      parts_.meter.rebook(parameter->grad, stage(s).index(), MemoryCategory::kGradients);
  }
}

bool StepLoop::lacks_room(double need) const {
  return twobp::lacks_room(static_cast<double>(parts_.meter.held(parts_.rank)), need,
                           static_cast<double>(plan_.cap(parts_.rank)));
}

void StepLoop::make_room(double peak, double held) {
  const double need = this->need(peak, held);
  turns_->make_room(need);
  const auto lacks = [&] { return !queue_.empty() && lacks_room(need); };
  if (!lacks()) return;
  interrupt([&] {
    while (lacks()) run_w(queue_.take_oldest());
  });
}

}  // namespace twobp
