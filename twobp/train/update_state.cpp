// The update's side of checkpoints: where weights and optimizer state live.
#include <functional>
#include <set>

#include "twobp/train/update.h"

namespace twobp {
namespace {

// `whole` is the parameter or something of its shape.
void each_part(const Parameter& parameter, const at::Tensor& whole,
               const std::function<void(const std::string& name, const at::Tensor& rows)>& visit) {
  int64_t row = 0;
  for (const ParameterPart& part : parameter.parts()) {
    visit(part.name, whole.narrow(0, row, part.rows));
    row += part.rows;
  }
}

}  // namespace

std::vector<LiveTensor> Update::live_weights() const {
  std::vector<LiveTensor> all;
  for (const Uses& uses : all_) {
    std::set<const void*> seen;  // uses on one rank share their weight
    for (const Use& use : uses) {
      const at::Tensor& master = use.parameter->master;
      if (!seen.insert(master.const_data_ptr()).second) continue;
      each_part(*use.parameter, master, [&](const std::string& name, const at::Tensor& rows) {
        all.push_back({name, rows, use.rank, seen.size() == 1, !use.parameter->trainable()});
      });
    }
  }
  return all;
}

std::vector<LiveTensor> Update::live_optimizer_state() const {
  std::vector<LiveTensor> all;
  std::set<std::string> known;
  for (size_t rank = 0; rank < optimizers_.size(); ++rank) {
    for (const Optimizer::State& state : optimizers_[rank]->state()) {
      each_part(*state.parameter, state.tensor, [&](const std::string& part, const at::Tensor& rows) {
        const std::string name = part + "." + state.name;
        const bool first = known.insert(name).second;
        all.push_back({name, rows, static_cast<int>(rank), first, false});
      });
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
