// The instructions of a step, of all ranks of this process, as a graph (see WorkGraph), on one or several
// devices. It holds F, I, W and the messages between ranks, in as many streams as they ran in. The host
// launches all of it by one call. Micro-batches and the loss's factors lie in the same place every time.
#pragma once

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "twobp/nn/context.h"
#include "twobp/nn/device/work_graph.h"
#include "twobp/pipeline/step_input.h"

namespace twobp {

// The properties of a training step that its graph fixes.
class StepKey {
 public:
  StepKey() = default;
  explicit StepKey(const StepInput& input);
  bool operator==(const StepKey&) const = default;
  // Whether the micro-batches of this step include the sizes of all those of `input`.
  bool has_sizes_of(const StepInput& input) const;

 private:
  using Sizes = std::vector<std::tuple<std::string, std::vector<int64_t>, at::ScalarType>>;
  static Sizes sizes_of(const Fields& fields);

  Schedule schedule_;
  P2Batching batching_ = P2Batching::kLoop;
  P2Order p2_order_ = P2Order::kOldest;
  std::vector<int64_t> cap_per_rank_;
  std::vector<Sizes> micro_batches_;
};

class StepGraph {
 public:
  // `record(inputs, begin)` lets every rank run its instructions for its input, after `begin`, and returns
  // their ends. `devices`: one for each rank. Throws Error if they have no graphs.
  using Record =
      std::function<std::vector<DeviceEvent>(const std::vector<StepInput>& inputs, const DeviceEvent& begin)>;
  StepGraph(const std::vector<Device>& devices, const StepInput& input, const Record& record);

  // Launches the graph for this step's micro-batches and loss factors, after the work in the compute stream
  // of each device's first rank, and returns its end. The micro-batches have the sizes that were recorded.
  DeviceEvent launch(const StepInput& input);

 private:
  // What the graph reads on a device, in its own memory.
  struct Inputs {
    Device device;
    std::vector<Fields> micro_batches;
    at::Tensor loss_factors;  // weight and scale, float64
  };
  Inputs& inputs_on(const at::Device& where);

  std::vector<Inputs> inputs_;  // the device of the first rank comes first
  std::unique_ptr<WorkGraph> graph_;
};

}  // namespace twobp
