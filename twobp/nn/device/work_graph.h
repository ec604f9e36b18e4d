// Work for a device, recorded once and then put into a stream again as one piece: a CUDA graph.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "twobp/nn/device/device.h"

namespace twobp {

class WorkGraph {
 public:
  virtual ~WorkGraph() = default;
  // Puts the recorded work into the current stream: on the same memory, with the numbers that the host gave.
  virtual void replay() = 0;
};

// Of what `work` puts into the current stream, which must not be a device's default one, and into streams
// that wait for it and that it waits for again, from any thread and on any of `devices`, all of one kind; the
// current one is the first. Nothing of it is done meanwhile; the host may neither wait for it nor bring
// anything over. The tensors that it names, but for those that it makes, must live as long as the graph.
// `work` has run before, so that libraries have set themselves up. Null where this program or this kind of
// device has no graphs.
std::unique_ptr<WorkGraph> record_graph(const std::vector<at::Device>& devices,
                                        const std::function<void()>& work);

// How devices of a kind record; LibTorch's CUDA is known.
using GraphRecorder = std::unique_ptr<WorkGraph> (*)(const std::vector<at::Device>& devices,
                                                     const std::function<void()>& work);
void record_graphs_by(at::DeviceType type, GraphRecorder recorder);

// Null in a program without CUDA.
std::unique_ptr<WorkGraph> record_cuda_graph(const std::vector<at::Device>& devices,
                                             const std::function<void()>& work);

}  // namespace twobp
