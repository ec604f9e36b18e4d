#include "twobp/pipeline/step_graph.h"

#include <algorithm>

#include "twobp/core/check.h"

namespace twobp {
namespace {

bool same_shape(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type();
}

bool same_shapes(const Fields& a, const Fields& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.first == y.first && same_shape(x.second, y.second);
  });
}

}  // namespace

StepGraph::StepGraph(const Device& device, const void* plan, const StepInput& input, const Record& record)
    : device_(device),
      plan_(plan),
      loss_scale_(input.loss_scale),
      gradient_scale_(input.gradient_scale),
      micro_batches_(*input.micro_batches) {
  const OnStream here(device_.compute());
  for (Fields& fields : micro_batches_) {
    for (auto& [name, tensor] : fields) tensor = on_device(tensor.contiguous(), device_.where());
  }
  device_.compute().wait_on_host();
  StepInput recorded = input;
  recorded.micro_batches = &micro_batches_;
  graph_ = record_graph(device_, [&] {
    for (const DeviceEvent& end : record(recorded, device_.compute().record())) device_.compute().wait(end);
  });
  TWOBP_CHECK(graph_, "pipeline.graphs is set, but ", device_.where().str(),
              " cannot record what is put into it: set it to false");
}

bool StepGraph::is_for(const void* plan, const StepInput& input) const {
  const std::vector<Fields>& others = *input.micro_batches;
  return plan == plan_ && input.loss_scale == loss_scale_ && input.gradient_scale == gradient_scale_ &&
         std::equal(others.begin(), others.end(), micro_batches_.begin(), micro_batches_.end(), same_shapes);
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
