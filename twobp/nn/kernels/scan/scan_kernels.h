// Our kernels for Mamba (arXiv 2312.00752): the selective scan and the causal depthwise convolution before it. The
// rules of kernels.h apply: pointers are raw, the source is compiled once per instruction set, and the caller manages
// the threads. A call works on one sequence and a group of its channels. Its output depends on these alone.
//
// With A (channels, state) negative, and per position t (rows of the matrices) and channel:
//   delta = softplus(raw + bias)              h_t = exp(delta A) h_(t-1) + delta B_t x_t     (state numbers)
//   y_t = C_t . h_t + D x_t                   out_t = y_t silu(z_t)
// The states of at most one chunk are in memory at a time. The states at the borders between chunks are kept for the
// backward pass, which recomputes the others.
#pragma once

#include <algorithm>
#include <cstdint>

#include "twobp/nn/kernels/instruction_sets.h"
#include "twobp/nn/kernels/number.h"

namespace twobp {

// Positions between two borders. A smaller value keeps more borders; a larger value needs more scratch memory.
inline constexpr int64_t kScanChunk = 32;
// The largest number of channels of one call. Sums over channels (dB, dC) are taken per group, then over the groups in
// order, so they are the same for any number of threads.
inline constexpr int64_t kScanGroup = 256;

// A matrix that may be a part of a wider one, so its rows may lie apart.
template <typename S>
struct Rows {
  S* data = nullptr;
  int64_t stride = 0;
};

struct ScanSize {
  int64_t sequence = 0;
  int64_t channels = 0;
  int64_t state = 0;

  int64_t borders() const { return std::max<int64_t>(0, (sequence - 1) / kScanChunk); }
  int64_t groups() const { return (channels + kScanGroup - 1) / kScanGroup; }
};

// The inputs of forward and backward for one sequence. S is the stored type, T the type of the computation.
template <typename S, typename T = Compute<S>>
struct ScanInput {
  ScanSize size;
  Rows<const S> x, delta, z;  // (sequence, channels); delta before softplus and without its bias
  Rows<const S> b, c;         // (sequence, state)
  const T* a;                 // (state, channels), A times log2(e), so that exp(delta A) = 2^(delta a)
  const T* d;                 // (channels)
  const T* delta_bias;        // (channels)
};

template <typename S, typename T = Compute<S>>
struct ScanOutput {
  Rows<S> out;
  T* borders;        // (borders, state, channels), where the backward pass starts its chunks; null: not kept
  const T* initial;  // (state, channels), the states before the first position; null: zeros
  T* final;          // (state, channels), the states after the last position; null: not wanted. May be `initial`.
};

template <typename S, typename T = Compute<S>>
struct ScanGradient {
  Rows<const S> dout;
  const T* borders;
  Rows<S> dx;      // may be dout
  Rows<S> ddelta;  // may be the input's delta
  Rows<S> dz;      // may be the input's z
  T* dbc;          // (sequence, 2 * state): dB and dC of this group
  T* da;           // (state, channels), with respect to A, not to the field a
  T* dd;           // (channels)
  T* ddelta_bias;  // (channels)
  // For a slice of a longer sequence, (state, channels):
  const T* initial = nullptr;  // the states before the first position; null: zeros
  const T* dfinal = nullptr;   // the gradient of the states after the last one; null: zeros
  T* dinitial = nullptr;       // the gradient of `initial`; null: not wanted
};

// y_t = silu(bias + sum over k of w_k x_(t - K + 1 + k)); positions before the first are 0.
template <typename S, typename T = Compute<S>>
struct ConvInput {
  int64_t sequence = 0;
  int64_t channels = 0;
  int64_t kernel = 0;
  Rows<const S> x;
  const T* weight;  // (kernel, channels)
  const T* bias;    // (channels)
};

template <typename S, typename T = Compute<S>>
struct ScanKernels {
  // The bytes of scratch memory, aligned to 64, that a call on a group needs.
  int64_t (*scratch_bytes)(const ScanSize& size);
  // Channels [begin, end): at most kScanGroup.
  void (*scan_forward)(const ScanInput<S>& in, const ScanOutput<S>& out, int64_t begin, int64_t end, void* scratch);
  void (*scan_backward)(const ScanInput<S>& in, const ScanGradient<S>& out, int64_t begin, int64_t end, void* scratch);

  // Positions [begin, end) of y (sequence, channels).
  void (*conv_forward)(const ConvInput<S>& in, Rows<S> y, int64_t begin, int64_t end);
  // Channels [begin, end): at most kScanGroup. The kernel is at most kMaxConvKernel. dx may be x. Writes dw (kernel,
  // channels) and dbias (channels).
  void (*conv_backward)(const ConvInput<S>& in, Rows<const S> dy, Rows<S> dx, T* dw, T* dbias, int64_t begin,
                        int64_t end);
};

inline constexpr int64_t kMaxConvKernel = 16;

TWOBP_KERNEL_FAMILY(ScanKernels, scan_kernels)

// The best kernels for this CPU.
template <typename S>
const ScanKernels<S>& scan_kernels() {
  static const KernelTable<ScanKernels>& best = scan_kernels_tables().best();
  return best.of<S>();
}

}  // namespace twobp
