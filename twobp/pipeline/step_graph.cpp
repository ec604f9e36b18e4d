#include "twobp/pipeline/step_graph.h"

#include <algorithm>

#include "twobp/core/check.h"

namespace twobp {

StepKey::StepKey(const StepInput& input)
    : schedule_(*input.schedule),
      batching_(input.batching),
      p2_order_(input.p2_order),
      slab_slots_(input.slab_slots),
      cap_per_rank_(input.cap_per_rank),
      loss_scale_(input.loss_scale),
      gradient_scale_(input.gradient_scale) {
  for (const Fields& fields : *input.micro_batches) micro_batches_.push_back(sizes_of(fields));
}

StepKey::Sizes StepKey::sizes_of(const Fields& fields) {
  Sizes sizes;
  for (const auto& [name, tensor] : fields)
    sizes.emplace_back(name, tensor.sizes().vec(), tensor.scalar_type());
  return sizes;
}

bool StepKey::has_sizes_of(const StepInput& input) const {
  return std::ranges::all_of(*input.micro_batches, [&](const Fields& fields) {
    return std::ranges::find(micro_batches_, sizes_of(fields)) != micro_batches_.end();
  });
}

StepGraph::StepGraph(const Device& device, const StepInput& input, const Record& record)
    : device_(device), micro_batches_(*input.micro_batches) {
  const OnStream here(device_.compute());
  for (Fields& fields : micro_batches_) {
    for (auto& [name, tensor] : fields) {
      tensor = at::empty(tensor.sizes(), tensor.options().device(device_.where())).copy_(tensor);
    }
  }
  device_.compute().wait_on_host();
  StepInput recorded = input;
  std::mutex turn;
  recorded.micro_batches = &micro_batches_;
  recorded.turn = &turn;
  graph_ = record_graph(device_, [&] {
    for (const DeviceEvent& end : record(recorded, device_.compute().record())) device_.compute().wait(end);
  });
  TWOBP_CHECK(graph_, "pipeline.graphs is set, but ", device_.where().str(),
              " cannot record what is put into it: set it to false");
}

DeviceEvent StepGraph::put_in(const std::vector<Fields>& micro_batches) {
  const OnStream here(device_.compute());
  for (size_t m = 0; m < micro_batches.size(); ++m) {
    for (const auto& [name, tensor] : micro_batches[m])
      micro_batches_[m].at(name).copy_(tensor, /*non_blocking=*/true);
  }
  graph_->replay();
  return device_.compute().record();
}

}  // namespace twobp
