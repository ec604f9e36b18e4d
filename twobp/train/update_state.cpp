// The update's side of checkpoints: where weights and optimizer state live.
#include <set>

#include "twobp/train/update.h"

namespace twobp {
std::vector<LiveTensor> Update::live_weights() const {
  std::vector<LiveTensor> all;
  for (const Uses& uses : all_) {
    std::set<const void*> seen;  // uses on one rank share their weight
    for (const Use& use : uses) {
      const at::Tensor& master = use.parameter->master;
      if (!seen.insert(master.const_data_ptr()).second) continue;
      const bool frozen = !use.parameter->trainable() && !use.parameter->is_buffer();
      for (auto& [name, rows] : use.parameter->parts_of(master)) {
        all.push_back({std::move(name), std::move(rows), use.rank, seen.size() == 1, frozen});
      }
    }
  }
  return all;
}

std::vector<LiveTensor> Update::live_optimizer_state() const {
  std::vector<LiveTensor> all;
  std::set<std::string> known;
  for (size_t rank = 0; rank < optimizers_.size(); ++rank) {
    for (const Optimizer::State& state : optimizers_[rank]->state()) {
      for (const auto& [part, rows] : state.parameter->parts_of(state.tensor)) {
        const std::string name = part + "." + state.name;
        const bool first = known.insert(name).second;
        all.push_back({name, rows, static_cast<int>(rank), first, false});
      }
    }
  }
  return all;
}

void Update::restored(int rank, int64_t optimizer_steps) {
  optimizers_[rank]->set_steps(optimizer_steps);
  for (const Uses& uses : all_) {
    for (const Use& use : uses) {
      if (use.rank == rank) use.parameter->refresh_value();
    }
  }
}

}  // namespace twobp
