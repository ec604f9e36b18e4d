// The selective scan of scan_kernels.h on a CUDA device, forward and backward, on raw device pointers. The algorithm is
// the same, with a thread for each channel. This is compiled if nvcc exists; scan_by_cuda.cpp calls it. Calls only
// queue work on the stream. Results do not depend on the order in which blocks run: sums over channels are taken per
// group of kScanGroup, and the caller adds up the groups in order.
#pragma once

#include <cstdint>

#include "twobp/nn/kernels/scan/scan_kernels.h"

namespace twobp {

// The largest number of states per channel.
inline constexpr int64_t kMaxCudaState = 64;

// A (batch, sequence, columns) array whose columns are neighbours in memory.
template <typename T>
struct Sequences {
  T* data = nullptr;
  int64_t sequence_stride = 0;
  int64_t row_stride = 0;
};

// T: float or double.
template <typename T>
struct CudaScanInput {
  int64_t batch = 0;
  ScanSize size;
  Sequences<const T> x, delta, z;  // columns: channels
  Sequences<const T> b, c;         // columns: states
  const T* a;                      // (state, channels), A times log2(e)
  const T* d;                      // (channels)
  const T* delta_bias;             // (channels)
};

template <typename T>
struct CudaScanOutput {
  Sequences<T> out;
  T* borders;        // (batch, borders, state, channels); null: not kept
  const T* initial;  // (batch, state, channels); null: 0
  T* final;          // (batch, state, channels); null: not wanted. May be `initial`.
};

template <typename T>
struct CudaScanGradient {
  Sequences<const T> dout;
  const T* borders;
  Sequences<T> dx, ddelta, dz;  // may be dout, the input's delta and its z
  T* dbc;                       // (batch, groups, sequence, 2 * state)
  T* da;                        // (batch, state, channels), with respect to A
  T* dd;                        // (batch, channels)
  T* ddelta_bias;               // (batch, channels)
};

// `stream` is a cudaStream_t. Returns a cudaError_t: 0 if the work was queued; cudaErrorInvalidValue for more than
// kMaxCudaState states or a batch above 65535.
template <typename T>
int cuda_scan_forward(const CudaScanInput<T>& in, const CudaScanOutput<T>& out, void* stream);
template <typename T>
int cuda_scan_backward(const CudaScanInput<T>& in, const CudaScanGradient<T>& out, void* stream);

}  // namespace twobp
