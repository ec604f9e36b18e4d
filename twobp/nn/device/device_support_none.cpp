// Without LibTorch's CUDA, no device of that kind is ever opened.
#include "twobp/nn/device/device_support.h"

namespace twobp {

DeviceSupport cuda_support() {
  return {};
}

}  // namespace twobp
