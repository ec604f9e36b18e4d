#include "twobp/pipeline/stage.h"

#include <algorithm>

#include "twobp/pipeline/memory/memory_meter.h"

namespace twobp {

Stage::Stage(int index, const ModelSpec& model, int first, int count, uint64_t seed, at::Device device)
    : index_(index),
      first_(first),
      first_backward_(std::clamp(model.first_trainable - first, 0, count)),
      gives_gradient_(first > model.first_trainable) {
  for (int i = first; i < first + count; ++i) {
    names_.push_back(model.layers[i].name);
    layers_.push_back(model.layers[i].make());
    layers_.back()->collect_parameters(parameters_.emplace_back());
    for (Parameter* parameter : parameters_.back()) {
      {
        const MemoryMeter::Scope scope(index, MemoryCategory::kParameters);
        parameter->allocate_value(seed);
        parameter->move_to(device);
      }
      const MemoryMeter::Scope scope(index, MemoryCategory::kGradients);
      parameter->allocate_grad();
    }
  }
}

void Stage::prepare_micro_batches(int count, int slices) {
  const bool as_before = slices == slices_ && static_cast<int>(saved_.size()) >= count * layer_count();
  while (static_cast<int>(saved_.size()) < count * layer_count()) saved_.push_back(std::make_unique<Saved>());
  if (slices > 1) {
    for (auto& saved : saved_) saved->forget_slice();  // of a step that was given up
  }
  if (as_before) return;
  slices_ = slices;
  const int known = static_cast<int>(saved_.size()) / std::max(1, layer_count());
  for (int m = 0; m < known; ++m) {
    for (int i = 0; i < layer_count(); ++i) saved(m, i).follow(m % slices > 0 ? &saved(m - 1, i) : nullptr);
  }
}

void Stage::forget_slices(int micro_batch, int layer) {
  for (Saved* one = &saved(micro_batch, layer); one != nullptr; one = one->previous()) one->forget_slice();
}

void Stage::release_saved() {
  for (auto& saved : saved_) {
    saved->release();
    saved->forget_slice();
  }
}

}  // namespace twobp
