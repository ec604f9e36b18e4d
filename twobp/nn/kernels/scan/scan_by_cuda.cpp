#include <c10/core/DeviceGuard.h>

#include "twobp/core/check.h"
#include "twobp/nn/kernels/rows/rows_by_cuda.h"
#include "twobp/nn/kernels/scan/scan_operators.h"
#include "twobp/nn/kernels/scan/selective_scan_cuda.h"

namespace twobp {
namespace {

constexpr int64_t kMostSequences = 65535;

bool takes(const ScanTensors& in) {
  const at::ScalarType type = in.x.scalar_type();
  return in.x.is_cuda() && (type == at::kFloat || type == at::kDouble) && in.a.size(0) <= kMaxCudaState &&
         in.x.size(0) <= kMostSequences;
}

template <typename T>
T* begin_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0) return nullptr;
  if constexpr (std::is_const_v<T>) {
    return tensor.const_data_ptr<std::remove_const_t<T>>();
  } else {
    return tensor.mutable_data_ptr<T>();
  }
}

template <typename T>
Sequences<T> sequences(const at::Tensor& tensor) {
  return {begin_of<T>(tensor), tensor.stride(0), tensor.stride(1)};
}

template <typename T>
CudaScanInput<T> input_of(const ScanTensors& in) {
  const int64_t state = in.a.size(0);
  return {in.x.size(0),
          {in.x.size(1), in.x.size(2), state},
          sequences<const T>(in.x),
          sequences<const T>(in.delta),
          sequences<const T>(in.z),
          sequences<const T>(in.bc.narrow(2, 0, state)),
          sequences<const T>(in.bc.narrow(2, state, state)),
          begin_of<const T>(in.a),
          begin_of<const T>(in.d),
          begin_of<const T>(in.delta_bias)};
}

void check(int error) {
  TWOBP_CHECK(error == 0, "CUDA cannot launch the selective scan: CUDA error ", error);
}

}  // namespace

bool scan_forward_by_cuda(const ScanTensors& in, const at::Tensor& out, const at::Tensor& borders,
                          const at::Tensor& initial, const at::Tensor& final) {
  if (!takes(in)) return false;
  const c10::DeviceGuard here(in.x.device());
  dispatch_wide(in.x, [&](auto zero) {
    using T = decltype(zero);
    const CudaScanOutput<T> to = {sequences<T>(out), begin_of<T>(borders),
                                  initial.defined() ? begin_of<T>(initial) : nullptr, begin_of<T>(final)};
    check(cuda_scan_forward(input_of<T>(in), to, current_stream(in.x)));
  });
  return true;
}

bool scan_backward_by_cuda(const ScanTensors& in, const at::Tensor& dout, const at::Tensor& borders,
                           const ScanGradientTensors& out) {
  if (!takes(in)) return false;
  const c10::DeviceGuard here(in.x.device());
  const int64_t groups = (in.x.size(2) + kScanGroup - 1) / kScanGroup;
  const at::Tensor dbc = at::empty({in.x.size(0), groups, in.x.size(1), 2 * in.a.size(0)}, in.a.options());
  dispatch_wide(in.x, [&](auto zero) {
    using T = decltype(zero);
    const CudaScanGradient<T> to = {sequences<const T>(dout), begin_of<const T>(borders), sequences<T>(out.dx),
                                    sequences<T>(out.ddelta), sequences<T>(out.dz),       begin_of<T>(dbc),
                                    begin_of<T>(out.da),      begin_of<T>(out.dd),        begin_of<T>(out.ddelta_bias)};
    check(cuda_scan_backward(input_of<T>(in), to, current_stream(in.x)));
  });
  out.dbc.copy_(sum_in_order(dbc.transpose(0, 1)));
  return true;
}

}  // namespace twobp
