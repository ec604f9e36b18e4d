#include "twobp/pipeline/executor/step_graph.h"

#include <algorithm>

#include "twobp/core/check.h"

namespace twobp {

StepKey::StepKey(std::shared_ptr<const StepPlan> plan, const StepBatch& batch) : plan_(std::move(plan)) {
  for (const Fields& fields : batch.micro_batches) micro_batches_.push_back(sizes_of(fields));
}

StepKey::Sizes StepKey::sizes_of(const Fields& fields) {
  Sizes sizes;
  for (const auto& [name, tensor] : fields) sizes.emplace_back(name, tensor.sizes().vec(), tensor.scalar_type());
  return sizes;
}

bool StepKey::has_sizes_of(const StepBatch& batch) const {
  return std::ranges::all_of(batch.micro_batches, [&](const Fields& fields) {
    return std::ranges::find(micro_batches_, sizes_of(fields)) != micro_batches_.end();
  });
}

StepGraph::StepGraph(const std::vector<Device>& devices, const StepRequest& request, const StepBatch& batch,
                     const Record& record, const OnRanks& on_ranks) {
  for (const Device& device : devices) {
    const auto there = [&](const Inputs& inputs) { return inputs.device.where() == device.where(); };
    if (std::ranges::none_of(inputs_, there))
      inputs_.push_back({device, {batch.micro_batches, {}, {}, batch.costs}, {}});
  }
  std::vector<at::Device> all;
  for (Inputs& inputs : inputs_) {
    const DeviceStream& stream = inputs.device.compute();
    const OnStream here(stream);
    all.push_back(inputs.device.where());
    for (Fields& fields : inputs.batch.micro_batches) {
      for (auto& [name, tensor] : fields)
        tensor = at::empty(tensor.sizes(), tensor.options().device(all.back())).copy_(tensor);
    }
    inputs.loss_factors = at::empty({2}, at::TensorOptions().dtype(at::kDouble).device(all.back()));
    stream.wait_on_host();
  }
  std::mutex turn;
  std::vector<DeviceEvent> ends(devices.size());
  const auto record_rank = [&](int rank, const DeviceEvent& begin) {
    const Inputs& inputs = inputs_on(devices[rank].where());
    StepRequest recorded = request;
    recorded.loss = {LossFactor(inputs.loss_factors[0]), LossFactor(inputs.loss_factors[1])};
    ends[rank] = record(rank, recorded, inputs.batch, begin, turn);
  };
  const DeviceStream& first = devices.front().compute();
  const OnStream here(first);
  graph_ = record_graph(all, [&] {
    const DeviceEvent begin = first.record();
    on_ranks([&](int rank) { record_rank(rank, begin); });
    for (const DeviceEvent& end : ends) first.wait(end);
  });
  TWOBP_CHECK(graph_, "pipeline.graphs is set, but ", all.front().str(),
              " cannot record its work as a graph: set it to false");
}

StepGraph::Inputs& StepGraph::inputs_on(const at::Device& where) {
  return *std::ranges::find(inputs_, where, [](const Inputs& inputs) { return inputs.device.where(); });
}

DeviceEvent StepGraph::launch(const StepRequest& request, const StepBatch& batch) {
  const std::vector<Fields>& micro_batches = batch.micro_batches;
  const at::Tensor loss_factors = at::tensor({request.loss.weight.number(), request.loss.scale.number()}, at::kDouble);
  const DeviceStream& first = inputs_.front().device.compute();
  for (Inputs& inputs : inputs_) {
    const OnStream here(inputs.device.compute());
    const auto write = [type = inputs.device.where().type()](at::Tensor& to, const at::Tensor& from) {
      to.copy_(pinned(from, type), /*non_blocking=*/true);
    };
    write(inputs.loss_factors, loss_factors);
    for (size_t m = 0; m < micro_batches.size(); ++m) {
      for (const auto& [name, tensor] : micro_batches[m]) write(inputs.batch.micro_batches[m].at(name), tensor);
    }
    first.wait(inputs.device.compute().record());
  }
  const OnStream here(first);
  graph_->replay();
  return first.record();
}

}  // namespace twobp
