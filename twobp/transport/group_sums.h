// Sums and copies that all ranks of a group make together by a library, which knows faster ways between many
// GPUs than messages (collectives.h). All ranks call the same operations in the same order. The library sums
// in an order of its own, which repeats on the same machines, but not elsewhere.
#pragma once

#include <ATen/ATen.h>

#include "twobp/nn/device/device.h"

namespace twobp {

class GroupSums {
 public:
  virtual ~GroupSums() = default;

  // Whether the library takes such a tensor. It depends on its device and dtype alone.
  virtual bool takes(const at::Tensor& tensor) const = 0;

  // Each of these begins when the work is done that the caller has launched in its current stream, and works
  // in place. `tensor` fills its memory without gaps, and has the same size and dtype on every rank. It is
  // kept until the event passes. Throws Aborted.
  virtual DeviceEvent all_reduce(const at::Tensor& tensor) = 0;
  // Only the tensor of rank `owner` becomes the sum. The others stay as they are.
  virtual DeviceEvent reduce(const at::Tensor& tensor, int owner) = 0;
  // The tensors become that of rank `root`.
  virtual DeviceEvent broadcast(const at::Tensor& tensor, int root) = 0;

  // Whether an operation is done. Never blocks. Throws Aborted.
  virtual bool passed(const DeviceEvent& done) = 0;
  // Waits until it is done. Throws Aborted, or after `timeout` seconds Error.
  virtual void wait(const DeviceEvent& done, double timeout) = 0;
};

}  // namespace twobp
