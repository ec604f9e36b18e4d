// A CUDA graph: work for a device that is recorded once and then launched again as a whole.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "twobp/nn/device/device.h"

namespace twobp {

class WorkGraph {
 public:
  virtual ~WorkGraph() = default;
  // Launches the recorded work in the current stream. It uses the same memory and the host values of the recording.
  virtual void replay() = 0;
};

// Records what `work` launches in the current stream, which must not be a device's default stream. Also recorded are
// other streams that wait for the current one and that it waits for in turn. They may belong to any thread and to any
// of `devices`. The devices are of one kind, and the first is the current one. Nothing runs during the recording, and
// the host may neither wait for the work nor copy anything to the device. The tensors that `work` uses, except those
// that it allocates, must live as long as the graph. `work` must have run once before, to initialize the libraries.
// Returns null if this program or this kind of device does not support graphs.
std::unique_ptr<WorkGraph> record_graph(const std::vector<at::Device>& devices, const std::function<void()>& work);

// Registers how devices of a kind record graphs. LibTorch's CUDA is built in.
using GraphRecorder = std::unique_ptr<WorkGraph> (*)(const std::vector<at::Device>& devices,
                                                     const std::function<void()>& work);
void record_graphs_by(at::DeviceType type, GraphRecorder recorder);

// Returns null in a program without CUDA.
std::unique_ptr<WorkGraph> record_cuda_graph(const std::vector<at::Device>& devices, const std::function<void()>& work);

}  // namespace twobp
