// Sums and copies that all ranks of a group make together by a library, which knows faster ways between many GPUs than
// messages (collectives.h). All ranks call the same operations in the same order. The library sums in an order of its
// own, which should repeat on the same machines with the same library, but not elsewhere.
#pragma once

#include <vector>

#include <ATen/ATen.h>

#include "twobp/nn/device/device.h"

namespace twobp {

class GroupSums {
 public:
  virtual ~GroupSums() = default;

  // Whether the library takes such a tensor. It depends on its device and dtype alone.
  virtual bool takes(const at::Tensor& tensor) const = 0;

  // Each of these begins when the work is done that the caller has launched in its current stream, and works in place.
  // The tensors fill their memory without gaps, and have the same sizes and dtypes on every rank. They are kept until
  // the event has been seen to pass. Throws Aborted, and Error for tensors that do not fit.
  virtual DeviceEvent all_reduce(const at::Tensor& tensor) = 0;
  // Of each tensor, only that of its owner becomes the sum. The others stay as they are.
  virtual DeviceEvent reduce(const std::vector<at::Tensor>& tensors, const std::vector<int>& owners) = 0;
  // Each tensor becomes that of its root.
  virtual DeviceEvent broadcast(const std::vector<at::Tensor>& tensors, const std::vector<int>& roots) = 0;

  // Whether an operation is done. Never blocks. Throws Aborted.
  virtual bool passed(const DeviceEvent& done) = 0;
  // Waits until it is done. Throws Aborted, or after `timeout` seconds Error.
  virtual void wait(const DeviceEvent& done, double timeout) = 0;
};

}  // namespace twobp
