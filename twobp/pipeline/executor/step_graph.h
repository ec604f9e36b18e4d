// The instructions of a step, of all ranks of this process, as a graph (see WorkGraph), on one or several devices. It
// holds F, I, W and the messages between ranks, in as many streams as they ran in. The host launches all of it by one
// call. Micro-batches and the loss's factors lie in the same place every time.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "twobp/nn/context.h"
#include "twobp/nn/device/gpu.h"
#include "twobp/pipeline/step_plan.h"
#include "twobp/pipeline/step_request.h"

namespace twobp {

// The properties of a training step that its graph fixes.
class StepKey {
 public:
  StepKey() = default;
  StepKey(std::shared_ptr<const StepPlan> plan, const StepBatch& batch);
  bool operator==(const StepKey&) const = default;
  // Whether the micro-batches of this step include the sizes of all those of `batch`.
  bool has_sizes_of(const StepBatch& batch) const;

 private:
  using Sizes = std::vector<std::tuple<std::string, std::vector<int64_t>, at::ScalarType>>;
  static Sizes sizes_of(const Fields& fields);

  std::shared_ptr<const StepPlan> plan_;  // the pipeline has one object for each plan
  std::vector<Sizes> micro_batches_;
};

class StepGraph {
 public:
  // `record` launches a rank's instructions after `begin`, on the rank's thread, and returns their end. `on_ranks`
  // calls a function on all ranks' threads. `devices`: one for each rank. Throws Error if they have no graphs.
  using Record = std::function<DeviceEvent(int rank, const StepRequest& request, const StepBatch& batch,
                                           const DeviceEvent& begin, std::mutex& turn)>;
  using OnRanks = std::function<void(const std::function<void(int rank)>& body)>;
  StepGraph(const std::vector<Device>& devices, const StepRequest& request, const StepBatch& batch,
            const Record& record, const OnRanks& on_ranks);

  // Launches the graph for this step's micro-batches and loss factors, after the work in the compute stream of each
  // device's first rank, and returns its end. The micro-batches have the sizes that were recorded.
  DeviceEvent launch(const StepRequest& request, const StepBatch& batch);

 private:
  // What the graph reads on a device, in its own memory.
  struct Inputs {
    Device device;
    StepBatch batch;
    at::Tensor loss_factors;  // weight and scale, float64
  };
  Inputs& inputs_on(const at::Device& where);

  std::vector<Inputs> inputs_;  // the device of the first rank comes first
  std::unique_ptr<WorkGraph> graph_;
};

}  // namespace twobp
