// Work for a device, recorded once and then put into a stream again as one piece: a CUDA graph.
#pragma once

#include <functional>
#include <memory>

#include "twobp/nn/device/device.h"

namespace twobp {

class WorkGraph {
 public:
  virtual ~WorkGraph() = default;
  // Puts the recorded work into the current stream.
  virtual void replay() = 0;
};

// Of what `work` puts into the current stream, which must not be the device's default one; the tensors that
// it names must live as long as the graph. `work` has run before, so that libraries have set themselves up.
// Null where this program or this device has no graphs.
std::unique_ptr<WorkGraph> record_graph(const Device& device, const std::function<void()>& work);

}  // namespace twobp
