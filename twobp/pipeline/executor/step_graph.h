// The instructions of a step of all ranks of this process, on one device or several, as a graph (see
// WorkGraph): F, I, W and what ranks hand each other, in as many streams as they ran in. The host launches
// them by one call; micro-batches lie in the same place every time.
#pragma once

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "twobp/nn/context.h"
#include "twobp/nn/device/work_graph.h"
#include "twobp/pipeline/step_input.h"

namespace twobp {

// Of a step that trains, all that a graph of it fixes.
class StepKey {
 public:
  StepKey() = default;
  explicit StepKey(const StepInput& input);
  bool operator==(const StepKey&) const = default;
  // Whether this step has micro-batches of the sizes of all those of `input`.
  bool has_sizes_of(const StepInput& input) const;

 private:
  using Sizes = std::vector<std::tuple<std::string, std::vector<int64_t>, at::ScalarType>>;
  static Sizes sizes_of(const Fields& fields);

  Schedule schedule_;
  P2Batching batching_ = P2Batching::kLoop;
  P2Order p2_order_ = P2Order::kOldest;
  std::vector<int64_t> cap_per_rank_;
  double loss_weight_ = 0;
  double loss_scale_ = 0;
  std::vector<Sizes> micro_batches_;
};

class StepGraph {
 public:
  // `record(inputs, begin)` has every rank run its instructions for its input, behind `begin`, and returns
  // their ends. `devices`: of each rank. Throws Error where they have no graphs.
  using Record =
      std::function<std::vector<DeviceEvent>(const std::vector<StepInput>& inputs, const DeviceEvent& begin)>;
  StepGraph(const std::vector<Device>& devices, const StepInput& input, const Record& record);

  // Launches the graph behind what is in the compute stream of each device's first rank, and returns its end.
  // The micro-batches have the sizes that it was recorded with.
  DeviceEvent launch(const std::vector<Fields>& micro_batches);

 private:
  // Micro-batches on a device, the graph's own.
  struct Inputs {
    Device device;
    std::vector<Fields> micro_batches;
  };
  Inputs& inputs_on(const at::Device& where);

  std::vector<Inputs> inputs_;  // the first rank's device first
  std::unique_ptr<WorkGraph> graph_;
};

}  // namespace twobp
