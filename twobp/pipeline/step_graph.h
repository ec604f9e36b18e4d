// The instructions of a step on one device, of all its ranks, as a graph (see WorkGraph): F, I, W and what
// ranks hand each other, in as many streams as they ran in. The host puts them in by one call; micro-batches
// lie in the same place every time.
#pragma once

#include <memory>
#include <vector>

#include "twobp/nn/context.h"
#include "twobp/nn/device/work_graph.h"
#include "twobp/pipeline/rank_executor.h"

namespace twobp {

class StepGraph {
 public:
  // `record(input, begin)` has every rank run its instructions for `input`, behind `begin`, and returns their
  // ends. Throws Error where the device has no graphs.
  using Record = std::function<std::vector<DeviceEvent>(const StepInput& input, const DeviceEvent& begin)>;
  StepGraph(const Device& device, const void* plan, const StepInput& input, const Record& record);

  // Whether what has been recorded is this step, but for the contents of its micro-batches.
  bool is_for(const void* plan, const StepInput& input) const;
  // Puts it in, behind what is in the device's compute stream; its end.
  DeviceEvent put_in(const std::vector<Fields>& micro_batches);

 private:
  Device device_;
  const void* plan_;
  double loss_scale_;
  double gradient_scale_;
  std::vector<Fields> micro_batches_;  // on the device
  std::unique_ptr<WorkGraph> graph_;
};

}  // namespace twobp
