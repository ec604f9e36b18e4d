// Our kernels for Mamba (arXiv 2312.00752): the selective scan and the causal depthwise convolution before
// it. As in kernels.h: raw pointers, compiled once per instruction set, threads are the caller's. A call
// works on one sequence and a group of its channels; what it writes depends on these alone.
//
// With A (channels, state) negative, and per position t (rows of the matrices) and channel:
//   delta = softplus(raw + bias)              h_t = exp(delta A) h_(t-1) + delta B_t x_t     (state numbers)
//   y_t = C_t . h_t + D x_t                   out_t = y_t silu(z_t)
// The states of all positions are never in memory: a chunk's at most, those at the borders between chunks are
// kept for the backward pass, which computes the others again.
#pragma once

#include <algorithm>
#include <cstdint>

#include "twobp/nn/kernels/instruction_sets.h"
#include "twobp/nn/kernels/number.h"

namespace twobp {

// Positions between two borders. A shorter one keeps more, a longer one needs a larger scratch.
inline constexpr int64_t kScanChunk = 32;
// Channels of one call at most. Sums over channels (dB, dC) are taken per group, then over groups in order:
// the same for any number of threads.
inline constexpr int64_t kScanGroup = 256;

// A matrix whose rows do not follow each other at once: a part of a wider one.
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

// What forward and backward read, of one sequence. S: as stored; T: as computed with.
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
  T* borders;  // (borders, state, channels), what the backward pass starts its chunks from; null: not kept
  const T* initial;  // (state, channels), the states before the first position; null: 0
  T* final;          // (state, channels), after the last one; null: not wanted. May be `initial`.
};

template <typename S, typename T = Compute<S>>
struct ScanGradient {
  Rows<const S> dout;
  const T* borders;
  Rows<S> dx;      // may be dout
  Rows<S> ddelta;  // may be the input's delta
  Rows<S> dz;      // may be the input's z
  T* dbc;          // (sequence, 2 * state): dB, dC of this group
  T* da;           // (state, channels), with respect to A, not a
  T* dd;           // (channels)
  T* ddelta_bias;  // (channels)
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
  // Bytes of scratch, aligned to 64, that a call on a group needs.
  int64_t (*scratch_bytes)(const ScanSize& size);
  // Channels [begin, end), at most kScanGroup.
  void (*scan_forward)(const ScanInput<S>& in, const ScanOutput<S>& out, int64_t begin, int64_t end,
                       void* scratch);
  void (*scan_backward)(const ScanInput<S>& in, const ScanGradient<S>& out, int64_t begin, int64_t end,
                        void* scratch);

  // Positions [begin, end) of y (sequence, channels).
  void (*conv_forward)(const ConvInput<S>& in, Rows<S> y, int64_t begin, int64_t end);
  // Channels [begin, end), at most kScanGroup, kernel at most kMaxConvKernel. dx may be x. Writes dw
  // (kernel, channels) and dbias (channels).
  void (*conv_backward)(const ConvInput<S>& in, Rows<const S> dy, Rows<S> dx, T* dw, T* dbias, int64_t begin,
                        int64_t end);
};

inline constexpr int64_t kMaxConvKernel = 16;

TWOBP_KERNEL_FAMILY(ScanKernels, scan_kernels)

// The best for this CPU.
template <typename S>
const ScanKernels<S>& scan_kernels() {
  static const KernelTable<ScanKernels>& best = scan_kernels_tables().best();
  return best.of<S>();
}

}  // namespace twobp
