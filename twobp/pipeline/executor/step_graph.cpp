#include "twobp/pipeline/executor/step_graph.h"

#include <algorithm>

#include "twobp/core/check.h"

namespace twobp {

StepKey::StepKey(const StepInput& input)
    : schedule_(*input.schedule),
      batching_(input.batching),
      p2_order_(input.p2_order),
      cap_per_rank_(input.cap_per_rank) {
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

StepGraph::StepGraph(const std::vector<Device>& devices, const StepInput& input, const Record& record) {
  for (const Device& device : devices) {
    const auto there = [&](const Inputs& inputs) { return inputs.device.where() == device.where(); };
    if (std::ranges::none_of(inputs_, there)) inputs_.push_back({device, *input.micro_batches, {}});
  }
  std::vector<at::Device> all;
  for (Inputs& inputs : inputs_) {
    const DeviceStream& stream = inputs.device.compute();
    const OnStream here(stream);
    all.push_back(inputs.device.where());
    for (Fields& fields : inputs.micro_batches) {
      for (auto& [name, tensor] : fields)
        tensor = at::empty(tensor.sizes(), tensor.options().device(all.back())).copy_(tensor);
    }
    inputs.loss_factors = at::empty({2}, at::TensorOptions().dtype(at::kDouble).device(all.back()));
    stream.wait_on_host();
  }
  std::mutex turn;
  std::vector<StepInput> recorded(devices.size(), input);
  for (size_t rank = 0; rank < devices.size(); ++rank) {
    const Inputs& inputs = inputs_on(devices[rank].where());
    recorded[rank].micro_batches = &inputs.micro_batches;
    recorded[rank].loss_weight = LossFactor(inputs.loss_factors[0]);
    recorded[rank].loss_scale = LossFactor(inputs.loss_factors[1]);
    recorded[rank].turn = &turn;
  }
  const DeviceStream& first = devices.front().compute();
  const OnStream here(first);
  graph_ = record_graph(all, [&] {
    for (const DeviceEvent& end : record(recorded, first.record())) first.wait(end);
  });
  TWOBP_CHECK(graph_, "pipeline.graphs is set, but ", all.front().str(),
              " cannot record its work as a graph: set it to false");
}

StepGraph::Inputs& StepGraph::inputs_on(const at::Device& where) {
  return *std::ranges::find(inputs_, where, [](const Inputs& inputs) { return inputs.device.where(); });
}

DeviceEvent StepGraph::launch(const StepInput& input) {
  const std::vector<Fields>& micro_batches = *input.micro_batches;
  const at::Tensor loss_factors =
      at::tensor({input.loss_weight.number(), input.loss_scale.number()}, at::kDouble);
  const DeviceStream& first = inputs_.front().device.compute();
  for (Inputs& inputs : inputs_) {
    const OnStream here(inputs.device.compute());
    const auto write = [type = inputs.device.where().type()](at::Tensor& to, const at::Tensor& from) {
      to.copy_(pinned(from, type), /*non_blocking=*/true);
    };
    write(inputs.loss_factors, loss_factors);
    for (size_t m = 0; m < micro_batches.size(); ++m) {
      for (const auto& [name, tensor] : micro_batches[m]) write(inputs.micro_batches[m].at(name), tensor);
    }
    first.wait(inputs.device.compute().record());
  }
  const OnStream here(first);
  graph_->replay();
  return first.record();
}

}  // namespace twobp
