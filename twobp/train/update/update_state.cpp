// The update's part in checkpoints: access to weights and optimizer state.
#include <algorithm>
#include <map>
#include <set>

#include "twobp/nn/device/device.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/train/update/update.h"
#include "twobp/transport/world.h"

namespace twobp {
std::vector<LiveTensor> Update::live_weights() const {
  std::vector<LiveTensor> all;
  for (const Uses& uses : all_) {
    std::set<int> seen;  // uses on one rank share their weight
    for (const Use& use : uses) {
      if (!seen.insert(use.rank).second || use.parameter == nullptr) continue;
      const bool frozen = !use.parameter->trainable() && !use.parameter->is_buffer();
      for (auto& [name, rows] : use.parameter->parts_of(use.parameter->master)) {
        all.push_back({std::move(name), std::move(rows), use.rank, seen.size() == 1, frozen});
      }
    }
  }
  return all;
}

std::vector<LiveTensor> Update::live_optimizer_state() const {
  std::map<const Parameter*, int> first_rank;  // by parameter: the first rank that has the weight
  for (const Uses& uses : all_) {
    int lowest = uses.front().rank;
    for (const Use& use : uses) lowest = std::min(lowest, use.rank);
    for (const Use& use : uses) first_rank[use.parameter] = lowest;
  }
  std::vector<LiveTensor> all;
  for (const int rank : pipeline_.world().local_ranks()) {
    std::vector<Optimizer::State> states = optimizers_[rank]->state();
    if (averages_[rank]) {
      for (Optimizer::State& mean : averages_[rank]->state()) states.push_back(std::move(mean));
    }
    for (const Optimizer::State& state : states) {
      for (const auto& [part, rows] : state.parameter->parts_of(state.tensor)) {
        all.push_back({part + "." + state.name, rows, rank, rank == first_rank.at(state.parameter), false});
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
