// A block is a group of channels of one sequence. A thread is a channel, with its states in registers. B and
// C of a chunk of positions are in shared memory. scan_kernels.h gives the formulas.
#include <cuda_runtime.h>

#include "twobp/nn/kernels/scan/selective_scan_cuda.h"

namespace twobp {
namespace {

constexpr int kThreads = kScanGroup;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;

template <typename T>
struct Step {
  T delta;  // softplus(v)
  T slope;  // sigmoid(v)
};
template <typename T>
__device__ Step<T> softplus(T v) {
  const T u = exp(v < 0 ? v : -v);
  return {(v > 0 ? v : T(0)) + log1p(u), (v < 0 ? u : T(1)) / (1 + u)};
}
template <typename T>
__device__ T sigmoid(T v) {
  return 1 / (1 + exp(-v));
}

template <typename T>
__device__ T& at(const Sequences<T>& s, int64_t sequence, int64_t t, int64_t column) {
  return s.data[sequence * s.sequence_stride + t * s.row_stride + column];
}

// Copies B and C of positions [first, last) into shared memory, (position, state) each.
template <typename T>
__device__ void load_chunk(const CudaScanInput<T>& in, int64_t sequence, int64_t first, int64_t last, T* b,
                           T* c) {
  const int64_t state = in.size.state;
  __syncthreads();  // all threads are done with the previous chunk
  for (int64_t i = threadIdx.x; i < (last - first) * state; i += kThreads) {
    b[i] = at(in.b, sequence, first + i / state, i % state);
    c[i] = at(in.c, sequence, first + i / state, i % state);
  }
  __syncthreads();
}

// Shared memory: B and C of a chunk and, in the backward pass, the warps' sums of a position.
template <typename T>
struct Shared {
  explicit __device__ Shared(int64_t state) {
    extern __shared__ unsigned char memory[];
    b = reinterpret_cast<T*>(memory);
    c = b + kScanChunk * state;
    sums = c + kScanChunk * state;
  }
  T* b;
  T* c;
  T* sums;  // (warp, 2 * state)
};

template <typename T, int kState>
__global__ void __launch_bounds__(kThreads) forward_kernel(CudaScanInput<T> in, CudaScanOutput<T> out) {
  const int64_t sequence = blockIdx.y;
  const int64_t channel = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t channels = in.size.channels;
  const int64_t state = in.size.state;
  const bool active = channel < channels;
  const Shared<T> shared(state);
  T h[kState] = {};
  T a[kState] = {};
  T d = 0;
  T bias = 0;
  if (active) {
    d = in.d[channel];
    bias = in.delta_bias[channel];
#pragma unroll
    for (int n = 0; n < kState; ++n) {
      if (n >= state) continue;
      a[n] = in.a[n * channels + channel];
      if (out.initial != nullptr) h[n] = out.initial[(sequence * state + n) * channels + channel];
    }
  }
  for (int64_t first = 0; first < in.size.sequence; first += kScanChunk) {
    const int64_t last = first + kScanChunk < in.size.sequence ? first + kScanChunk : in.size.sequence;
    load_chunk(in, sequence, first, last, shared.b, shared.c);
    if (!active) continue;
    if (out.borders != nullptr && first > 0) {
      const int64_t border = sequence * ((in.size.sequence - 1) / kScanChunk) + first / kScanChunk - 1;
#pragma unroll
      for (int n = 0; n < kState; ++n) {
        if (n < state) out.borders[(border * state + n) * channels + channel] = h[n];
      }
    }
    for (int64_t t = first; t < last; ++t) {
      const T* const b = shared.b + (t - first) * state;
      const T* const c = shared.c + (t - first) * state;
      const T delta = softplus(at(in.delta, sequence, t, channel) + bias).delta;
      const T x = at(in.x, sequence, t, channel);
      const T z = at(in.z, sequence, t, channel);
      T y = d * x;
#pragma unroll
      for (int n = 0; n < kState; ++n) {
        if (n >= state) continue;
        h[n] = exp2(delta * a[n]) * h[n] + delta * x * b[n];
        y += h[n] * c[n];
      }
      at(out.out, sequence, t, channel) = y * z * sigmoid(z);
    }
  }
  if (!active || out.final == nullptr) return;
#pragma unroll
  for (int n = 0; n < kState; ++n) {
    if (n < state) out.final[(sequence * state + n) * channels + channel] = h[n];
  }
}

// The sum over a warp's lanes, in lane 0. The order of the additions is fixed.
template <typename T>
__device__ T sum_of_warp(T v) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    v += __shfl_down_sync(0xffffffffu, v, distance);
  }
  return v;
}

template <typename T, int kState>
__global__ void __launch_bounds__(kThreads) backward_kernel(CudaScanInput<T> in, CudaScanGradient<T> out) {
  const int64_t sequence = blockIdx.y;
  const int64_t channel = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t channels = in.size.channels;
  const int64_t state = in.size.state;
  const int64_t borders = (in.size.sequence - 1) / kScanChunk;
  const bool active = channel < channels;  // inactive threads add zeros to the sums over channels
  const int warp = threadIdx.x / kWarp;
  const bool first_lane = threadIdx.x % kWarp == 0;
  const Shared<T> shared(state);
  // The states before each position of the chunk and after the last, in local memory.
  T states[kScanChunk + 1][kState];
  T y[kScanChunk];
  T g[kState] = {};  // dL/dh from later positions
  T a[kState] = {};
  T da[kState] = {};
  T d = 0;
  T bias = 0;
  T dd = 0;
  T dbias = 0;
  if (active) {
    d = in.d[channel];
    bias = in.delta_bias[channel];
#pragma unroll
    for (int n = 0; n < kState; ++n) {
      if (n < state) a[n] = in.a[n * channels + channel];
    }
  }
  for (int64_t chunk = borders; chunk >= 0; --chunk) {
    const int64_t first = chunk * kScanChunk;
    const int64_t last = first + kScanChunk < in.size.sequence ? first + kScanChunk : in.size.sequence;
    load_chunk(in, sequence, first, last, shared.b, shared.c);
    if (active) {
#pragma unroll
      for (int n = 0; n < kState; ++n) {
        const int64_t border = sequence * borders + chunk - 1;
        states[0][n] = n < state && chunk > 0 ? out.borders[(border * state + n) * channels + channel] : T(0);
      }
      for (int64_t t = first; t < last; ++t) {
        const int64_t i = t - first;
        const T delta = softplus(at(in.delta, sequence, t, channel) + bias).delta;
        const T x = at(in.x, sequence, t, channel);
        y[i] = d * x;
#pragma unroll
        for (int n = 0; n < kState; ++n) {
          if (n >= state) continue;
          const T h = exp2(delta * a[n]) * states[i][n] + delta * x * shared.b[i * state + n];
          states[i + 1][n] = h;
          y[i] += h * shared.c[i * state + n];
        }
      }
    }
    for (int64_t t = last - 1; t >= first; --t) {
      const int64_t i = t - first;
      T delta = 0;
      T slope = 0;
      T x = 0;
      T dy = 0;
      if (active) {
        const Step<T> step = softplus(at(in.delta, sequence, t, channel) + bias);
        delta = step.delta;
        slope = step.slope;
        x = at(in.x, sequence, t, channel);
        const T z = at(in.z, sequence, t, channel);
        const T dout = at(out.dout, sequence, t, channel);
        const T gate = sigmoid(z);
        dy = dout * z * gate;
        at(out.dz, sequence, t, channel) = dout * y[i] * gate * (1 + z * (1 - gate));
      }
      T of_b = 0;
      T of_a = 0;
#pragma unroll
      for (int n = 0; n < kState; ++n) {
        if (n >= state) continue;  // the same for all threads
        T db = 0;
        T dc = 0;
        if (active) {
          const T gradient = dy * shared.c[i * state + n] + g[n];
          const T decay = exp2(delta * a[n]);
          const T of_decay = gradient * decay * states[i][n];
          of_b += gradient * shared.b[i * state + n];
          of_a += of_decay * a[n];
          da[n] += of_decay * delta;
          g[n] = decay * gradient;
          db = gradient * delta * x;
          dc = dy * states[i + 1][n];
        }
        db = sum_of_warp(db);
        dc = sum_of_warp(dc);
        if (first_lane) {
          shared.sums[warp * 2 * state + n] = db;
          shared.sums[warp * 2 * state + state + n] = dc;
        }
      }
      if (active) {
        const T ddelta = (x * of_b + of_a * T(0.69314718055994530942)) * slope;
        at(out.dx, sequence, t, channel) = dy * d + delta * of_b;
        at(out.ddelta, sequence, t, channel) = ddelta;
        dd += dy * x;
        dbias += ddelta;
      }
      __syncthreads();
      const int64_t row = (sequence * gridDim.x + blockIdx.x) * in.size.sequence + t;
      for (int64_t n = threadIdx.x; n < 2 * state; n += kThreads) {
        T sum = shared.sums[n];
        for (int w = 1; w < kWarps; ++w) sum += shared.sums[w * 2 * state + n];
        out.dbc[row * 2 * state + n] = sum;
      }
      __syncthreads();
    }
  }
  if (!active) return;
#pragma unroll
  for (int n = 0; n < kState; ++n) {
    if (n < state) out.da[(sequence * state + n) * channels + channel] = da[n];
  }
  out.dd[sequence * channels + channel] = dd;
  out.ddelta_bias[sequence * channels + channel] = dbias;
}

template <typename T, typename Out>
int launch(void (*few)(CudaScanInput<T>, Out), void (*many)(CudaScanInput<T>, Out),
           const CudaScanInput<T>& in, const Out& out, int64_t sums, void* stream) {
  if (in.size.state < 1 || in.size.state > kMaxCudaState || in.batch > 65535) return cudaErrorInvalidValue;
  if (in.batch == 0 || in.size.sequence == 0 || in.size.channels == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>((in.size.channels + kThreads - 1) / kThreads),
                  static_cast<unsigned>(in.batch));
  const size_t bytes = static_cast<size_t>(2 * kScanChunk * in.size.state + sums) * sizeof(T);
  CudaScanInput<T> input = in;
  Out output = out;
  void* arguments[] = {&input, &output};
  const void* kernel = reinterpret_cast<const void*>(in.size.state <= 16 ? few : many);
  return cudaLaunchKernel(kernel, grid, dim3(kThreads), arguments, bytes, static_cast<cudaStream_t>(stream));
}

}  // namespace

// The limit of a block's shared memory without a special request.
static_assert((2 * kScanChunk * kMaxCudaState + kWarps * 2 * kMaxCudaState) * sizeof(double) <= 48 * 1024);

template <typename T>
int cuda_scan_forward(const CudaScanInput<T>& in, const CudaScanOutput<T>& out, void* stream) {
  return launch<T>(forward_kernel<T, 16>, forward_kernel<T, kMaxCudaState>, in, out, 0, stream);
}

template <typename T>
int cuda_scan_backward(const CudaScanInput<T>& in, const CudaScanGradient<T>& out, void* stream) {
  return launch<T>(backward_kernel<T, 16>, backward_kernel<T, kMaxCudaState>, in, out,
                   kWarps * 2 * in.size.state, stream);
}

template int cuda_scan_forward(const CudaScanInput<float>&, const CudaScanOutput<float>&, void*);
template int cuda_scan_forward(const CudaScanInput<double>&, const CudaScanOutput<double>&, void*);
template int cuda_scan_backward(const CudaScanInput<float>&, const CudaScanGradient<float>&, void*);
template int cuda_scan_backward(const CudaScanInput<double>&, const CudaScanGradient<double>&, void*);

}  // namespace twobp
