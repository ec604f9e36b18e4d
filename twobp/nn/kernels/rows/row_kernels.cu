// A block of threads computes a row where a row has a sum; elsewhere a thread computes some neighbouring
// numbers. Numbers are read and written 16 bytes at a time where all rows allow it.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "twobp/nn/kernels/rows/row_kernels_cuda.h"
#include "twobp/nn/kernels/number.h"

namespace twobp {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kGainRows = 32;  // rows of a block of dgain
constexpr int kGainColumns = 64;

template <typename S>
__device__ Compute<S> wide(S x) {
  return static_cast<Compute<S>>(x);
}
template <typename S, int N>
struct alignas(N * sizeof(S)) Pack {
  S numbers[N];
};
// N neighbours, as wide numbers.
template <int N, typename S>
__device__ void load(const S* from, Compute<S> (&to)[N]) {
  const auto pack = *reinterpret_cast<const Pack<S, N>*>(from);
#pragma unroll
  for (int k = 0; k < N; ++k) to[k] = wide(pack.numbers[k]);
}
template <int N, typename S>
__device__ void store(S* to, const Compute<S> (&from)[N]) {
  Pack<S, N> pack;
#pragma unroll
  for (int k = 0; k < N; ++k) pack.numbers[k] = static_cast<S>(from[k]);
  *reinterpret_cast<Pack<S, N>*>(to) = pack;
}

// The block's sum, on all of its threads.
template <typename T>
__device__ T block_sum(T x) {
  __shared__ T of_warps[kThreads / kWarp];
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  __syncthreads();  // the memory may still be in use for the previous sum
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = x;
  __syncthreads();
  T sum = 0;
#pragma unroll
  for (int warp = 0; warp < kThreads / kWarp; ++warp) sum += of_warps[warp];
  return sum;
}
template <typename T>
__device__ T block_max(T x) {
  __shared__ T of_warps[kThreads / kWarp];
  for (int step = kWarp / 2; step > 0; step /= 2) x = max(x, __shfl_xor_sync(0xffffffffu, x, step));
  __syncthreads();
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = x;
  __syncthreads();
  T most = of_warps[0];
#pragma unroll
  for (int warp = 1; warp < kThreads / kWarp; ++warp) most = max(most, of_warps[warp]);
  return most;
}

// ---------------------------------------------------------------- RMSNorm
template <int N, typename S>
__global__ void __launch_bounds__(kThreads)
    rms_norm_forward(int64_t cols, const S* x, const Compute<S>* gain, Compute<S> eps, S* y, Compute<S>* rstd) {
  using T = Compute<S>;
  x += blockIdx.x * cols;
  y += blockIdx.x * cols;
  T sum = 0;
  for (int64_t i = threadIdx.x * N; i < cols; i += kThreads * N) {
    T v[N];
    load<N>(x + i, v);
#pragma unroll
    for (int k = 0; k < N; ++k) sum += v[k] * v[k];
  }
  const T scale = 1 / sqrt(block_sum(sum) / cols + eps);
  if (threadIdx.x == 0) rstd[blockIdx.x] = scale;
  for (int64_t i = threadIdx.x * N; i < cols; i += kThreads * N) {
    T v[N];
    load<N>(x + i, v);
#pragma unroll
    for (int k = 0; k < N; ++k) v[k] = v[k] * scale * gain[i + k];
    store<N>(y + i, v);
  }
}

// dx = (g - xhat mean(g xhat)) rstd with g = dy gain and xhat = x rstd.
template <int N, typename S>
__global__ void __launch_bounds__(kThreads)
    rms_norm_backward(int64_t cols, const S* dy, const S* x, const Compute<S>* gain, const Compute<S>* rstd,
                      S* dx) {
  using T = Compute<S>;
  dy += blockIdx.x * cols;
  x += blockIdx.x * cols;
  dx += blockIdx.x * cols;
  const T scale = rstd[blockIdx.x];
  T sum = 0;
  for (int64_t i = threadIdx.x * N; i < cols; i += kThreads * N) {
    T g[N], v[N];
    load<N>(dy + i, g);
    load<N>(x + i, v);
#pragma unroll
    for (int k = 0; k < N; ++k) sum += g[k] * gain[i + k] * (v[k] * scale);
  }
  const T mean = block_sum(sum) / cols;
  for (int64_t i = threadIdx.x * N; i < cols; i += kThreads * N) {
    T g[N], v[N];
    load<N>(dy + i, g);
    load<N>(x + i, v);
#pragma unroll
    for (int k = 0; k < N; ++k) g[k] = (g[k] * gain[i + k] - v[k] * scale * mean) * scale;
    store<N>(dx + i, g);
  }
}

// A block sums kGainRows rows of kGainColumns columns: each of its rows of threads takes every fourth row.
// add(row, i, sums) adds number i, which is in this row, to the thread's sums. write(i, sums) gets those of
// the block's column i.
template <int kSums, typename T, typename Add, typename Write>
__device__ void sum_columns(int64_t rows, int64_t cols, const Add& add, const Write& write) {
  constexpr int kSteps = kThreads / kGainColumns;
  __shared__ T of_steps[kSums][kThreads];
  const int64_t col = int64_t{blockIdx.y} * kGainColumns + threadIdx.x % kGainColumns;
  const int step = threadIdx.x / kGainColumns;
  const int64_t first = int64_t{blockIdx.x} * kGainRows;
  T sums[kSums] = {};
  if (col < cols) {
    for (int64_t row = first + step; row < min(first + kGainRows, rows); row += kSteps)
      add(row, row * cols + col, sums);
  }
#pragma unroll
  for (int k = 0; k < kSums; ++k) of_steps[k][threadIdx.x] = sums[k];
  __syncthreads();
  if (step > 0 || col >= cols) return;
#pragma unroll
  for (int k = 0; k < kSums; ++k) {
    for (int other = 1; other < kSteps; ++other) sums[k] += of_steps[k][threadIdx.x + other * kGainColumns];
  }
  write(blockIdx.x * cols + col, sums);
}

template <typename S>
__global__ void __launch_bounds__(kThreads)
    rms_norm_dgain(int64_t rows, int64_t cols, const S* dy, const S* x, const Compute<S>* rstd, Compute<S>* dgain) {
  using T = Compute<S>;
  sum_columns<1, T>(
      rows, cols, [&](int64_t row, int64_t i, T(&sums)[1]) { sums[0] += wide(dy[i]) * (wide(x[i]) * rstd[row]); },
      [&](int64_t i, const T(&sums)[1]) { dgain[i] = sums[0]; });
}

// ---------------------------------------------------------------- LayerNorm
// The deviations are summed in a second pass, because a difference of large sums would lose digits. The row is
// in the cache by then.
template <int N, typename S>
__global__ void __launch_bounds__(kThreads)
    layer_norm_forward(int64_t cols, const S* x, const Compute<S>* gain, const Compute<S>* bias, Compute<S> eps, S* y,
                       Compute<S>* means, Compute<S>* rstd) {
  using T = Compute<S>;
  x += blockIdx.x * cols;
  y += blockIdx.x * cols;
  T sum = 0;
  for (int64_t i = threadIdx.x * N; i < cols; i += kThreads * N) {
    T v[N];
    load<N>(x + i, v);
#pragma unroll
    for (int k = 0; k < N; ++k) sum += v[k];
  }
  const T mean = block_sum(sum) / cols;
  T squares = 0;
  for (int64_t i = threadIdx.x * N; i < cols; i += kThreads * N) {
    T v[N];
    load<N>(x + i, v);
#pragma unroll
    for (int k = 0; k < N; ++k) squares += (v[k] - mean) * (v[k] - mean);
  }
  const T scale = 1 / sqrt(block_sum(squares) / cols + eps);
  if (threadIdx.x == 0) {
    means[blockIdx.x] = mean;
    rstd[blockIdx.x] = scale;
  }
  for (int64_t i = threadIdx.x * N; i < cols; i += kThreads * N) {
    T v[N];
    load<N>(x + i, v);
#pragma unroll
    for (int k = 0; k < N; ++k) v[k] = (v[k] - mean) * scale * gain[i + k] + bias[i + k];
    store<N>(y + i, v);
  }
}

// dx = (g - mean(g) - xhat mean(g xhat)) rstd with g = dy gain and xhat = (x - mean(x)) rstd.
template <int N, typename S>
__global__ void __launch_bounds__(kThreads)
    layer_norm_backward(int64_t cols, const S* dy, const S* x, const Compute<S>* gain, const Compute<S>* means,
                        const Compute<S>* rstd, S* dx) {
  using T = Compute<S>;
  dy += blockIdx.x * cols;
  x += blockIdx.x * cols;
  dx += blockIdx.x * cols;
  const T mean = means[blockIdx.x];
  const T scale = rstd[blockIdx.x];
  T of_g = 0, of_products = 0;
  for (int64_t i = threadIdx.x * N; i < cols; i += kThreads * N) {
    T g[N], v[N];
    load<N>(dy + i, g);
    load<N>(x + i, v);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      of_g += g[k] * gain[i + k];
      of_products += g[k] * gain[i + k] * ((v[k] - mean) * scale);
    }
  }
  const T mean_g = block_sum(of_g) / cols;
  const T mean_product = block_sum(of_products) / cols;
  for (int64_t i = threadIdx.x * N; i < cols; i += kThreads * N) {
    T g[N], v[N];
    load<N>(dy + i, g);
    load<N>(x + i, v);
#pragma unroll
    for (int k = 0; k < N; ++k)
      g[k] = (g[k] * gain[i + k] - mean_g - (v[k] - mean) * scale * mean_product) * scale;
    store<N>(dx + i, g);
  }
}

template <typename S>
__global__ void __launch_bounds__(kThreads)
    layer_norm_sums(int64_t rows, int64_t cols, const S* dy, const S* x, const Compute<S>* means,
                    const Compute<S>* rstd, Compute<S>* dgain, Compute<S>* dbias) {
  using T = Compute<S>;
  sum_columns<2, T>(
      rows, cols,
      [&](int64_t row, int64_t i, T(&sums)[2]) {
        sums[0] += wide(dy[i]) * ((wide(x[i]) - means[row]) * rstd[row]);
        sums[1] += wide(dy[i]);
      },
      [&](int64_t i, const T(&sums)[2]) {
        dgain[i] = sums[0];
        dbias[i] = sums[1];
      });
}

// ---------------------------------------------------------------- rotary embedding
template <int N, typename S>
__global__ void __launch_bounds__(kThreads)
    rotate(int64_t count, CudaRope rope, S* x, const Compute<S>* cos, const Compute<S>* sin) {
  using T = Compute<S>;
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (thread >= count) return;
  const int64_t packs = rope.half / N;
  const int64_t i = thread % packs * N;
  const int64_t head = thread / packs % rope.heads;
  const int64_t row = thread / packs / rope.heads;
  S* const at = x + row * rope.stride + rope.first + head * rope.step + i;
  const int64_t angle = row % rope.positions * rope.half + i;
  T a[N], b[N], ra[N], rb[N];
  load<N>(at, a);
  load<N>(at + rope.half, b);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const T c = cos[angle + k];
    const T s = sin[angle + k] * static_cast<T>(rope.direction);
    ra[k] = a[k] * c - b[k] * s;
    rb[k] = b[k] * c + a[k] * s;
  }
  store<N>(at, ra);
  store<N>(at + rope.half, rb);
}

// ---------------------------------------------------------------- gated linear units
// The gate and its derivative: silu, or gelu in its two forms (arXiv 1606.08415, section 2).
template <Gate kGate, typename T>
__device__ void open(T x, T& value, T& slope) {
  if constexpr (kGate == Gate::kSilu) {
    const T s = 1 / (1 + exp(-x));
    value = x * s;
    slope = s * (1 + x * (1 - s));
  } else if constexpr (kGate == Gate::kGelu) {
    const T below = T(0.5) * (1 + erf(x * T(0.70710678118654752440)));  // Phi(x)
    value = x * below;
    slope = below + x * exp(x * x * T(-0.5)) * T(0.39894228040143267794);
  } else {
    constexpr double kScale = 0.79788456080286535588;  // sqrt(2 / pi)
    const T t = tanh(T(kScale) * (x + T(0.044715) * x * x * x));
    value = T(0.5) * x * (1 + t);
    slope = T(0.5) * (1 + t) + T(0.5) * x * (1 - t * t) * T(kScale) * (1 + 3 * T(0.044715) * x * x);
  }
}

template <Gate kGate, int N, typename S>
__global__ void __launch_bounds__(kThreads)
    glu_forward(int64_t count, int64_t cols, const S* x, int64_t stride, S* act) {
  using T = Compute<S>;
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (thread >= count) return;
  const int64_t row = thread / (cols / N);
  const int64_t i = thread % (cols / N) * N;
  T g[N], u[N];
  load<N>(x + row * stride + i, g);
  load<N>(x + row * stride + cols + i, u);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    T value, slope;
    open<kGate>(g[k], value, slope);
    u[k] *= value;
  }
  store<N>(act + row * cols + i, u);
}

template <Gate kGate, int N, typename S>
__global__ void __launch_bounds__(kThreads)
    glu_backward(int64_t count, int64_t cols, const S* x, int64_t stride, const S* dact, S* dx,
                 int64_t dx_stride) {
  using T = Compute<S>;
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (thread >= count) return;
  const int64_t row = thread / (cols / N);
  const int64_t i = thread % (cols / N) * N;
  T g[N], u[N], dy[N];
  load<N>(x + row * stride + i, g);
  load<N>(x + row * stride + cols + i, u);
  load<N>(dact + row * cols + i, dy);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    T value, slope;
    open<kGate>(g[k], value, slope);
    g[k] = dy[k] * u[k] * slope;
    u[k] = dy[k] * value;
  }
  store<N>(dx + row * dx_stride + i, g);
  store<N>(dx + row * dx_stride + cols + i, u);
}

// ---------------------------------------------------------------- cross-entropy
template <int N, typename S>
__global__ void __launch_bounds__(kThreads)
    cross_entropy(int64_t cols, S* logits, int64_t stride, const int64_t* targets, int64_t ignore,
                  double host_scale, const double* device_scale, bool gradient, double* losses) {
  using T = Compute<S>;
  const T scale = static_cast<T>(device_scale == nullptr ? host_scale : *device_scale);
  S* const row = logits + blockIdx.x * stride;
  const int64_t target = targets[blockIdx.x];
  if (target == ignore) {
    if (threadIdx.x == 0) losses[blockIdx.x] = 0;
    const T zeros[N] = {};
    for (int64_t i = threadIdx.x * N; gradient && i < cols; i += kThreads * N) store<N>(row + i, zeros);
    return;
  }
  // Each thread sums relative to its own largest logit, so that one pass reads the row.
  T most = -INFINITY, sum = 0;
  for (int64_t i = threadIdx.x * N; i < cols; i += kThreads * N) {
    T v[N];
    load<N>(row + i, v);
    T larger = most;
#pragma unroll
    for (int k = 0; k < N; ++k) larger = max(larger, v[k]);
    if (larger > most) sum *= exp(most - larger);
    most = larger;
#pragma unroll
    for (int k = 0; k < N; ++k) sum += v[k] == -INFINITY ? 0 : exp(v[k] - most);  // all so far may be -infinity
  }
  const T of_all = block_max(most);
  const T log_sum = of_all + log(block_sum(most == of_all ? sum : sum * exp(most - of_all)));
  const bool known = target >= 0 && target < cols;
  if (threadIdx.x == 0)
    losses[blockIdx.x] = known ? static_cast<double>(log_sum - wide(row[target])) : double(NAN);
  if (!gradient) return;
  __syncthreads();  // row[target] has been read
  for (int64_t i = threadIdx.x * N; i < cols; i += kThreads * N) {
    T v[N];
    load<N>(row + i, v);
#pragma unroll
    for (int k = 0; k < N; ++k) v[k] = (exp(v[k] - log_sum) - (i + k == target ? T(1) : T(0))) * scale;
    store<N>(row + i, v);
  }
}

// ---------------------------------------------------------------- dropout
// As random_words and for_each_kept of dropout.h. A thread draws the four words of a group.
template <typename S>
__global__ void __launch_bounds__(kThreads)
    dropout_factors(int64_t count, int64_t cols, DropoutMask mask, const int64_t* rows, S* out) {
  constexpr int64_t kChunk = 1024;
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (thread >= count) return;
  const int64_t row_groups = (cols + 7) / 8;
  const int64_t row = thread / row_groups;
  const int64_t group = thread % row_groups;
  const int64_t begin = group / (kChunk / 8) * kChunk;
  const int64_t in_chunk = min(cols - begin, kChunk);
  const int64_t groups = (in_chunk + 7) / 8;
  const int64_t half = min(in_chunk, 4 * groups);
  uint32_t a = static_cast<uint32_t>(group);
  uint32_t b = mask.row(static_cast<uint32_t>(rows[row]));
  uint32_t c = mask.micro_batch;
  uint32_t d = 0;
  uint32_t key0 = mask.key[0], key1 = mask.key[1];
#pragma unroll
  for (int round = 0; round < 7; ++round) {
    const uint32_t high0 = __umulhi(0xD2511F53u, a), low0 = 0xD2511F53u * a;
    const uint32_t high1 = __umulhi(0xCD9E8D57u, c), low1 = 0xCD9E8D57u * c;
    a = high1 ^ b ^ key0;
    b = low1;
    c = high0 ^ d ^ key1;
    d = low0;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  const uint32_t words[4] = {a, b, c, d};
  const auto factor = [&](uint32_t bits) {
    return static_cast<S>(bits >= mask.threshold ? static_cast<Compute<S>>(mask.scale) : Compute<S>(0));
  };
  S* const to = out + row * cols + begin;
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    const int64_t column = word * groups + (group - begin / 8);
    if (column < half) to[column] = factor(words[word] & 0xffff);
    if (half + column < in_chunk) to[half + column] = factor(words[word] >> 16);
  }
}

// ---------------------------------------------------------------- sum of squares
// One number at a time: the order must depend neither on where x begins nor on how long it is.
template <typename S>
__global__ void __launch_bounds__(kThreads) sums_of_squares(int64_t count, const S* x, double* sums) {
  double sum = 0;
  const int64_t begin = int64_t{blockIdx.x} * kSquareBlock;
  const int64_t end = min(count, begin + kSquareBlock);
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    Compute<S> v[1];
    load<1>(x + i, v);
    sum += static_cast<double>(v[0]) * static_cast<double>(v[0]);
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// ---------------------------------------------------------------- launches
// Calls body(S()) for the type.
template <typename Body>
int for_type(CudaNumber type, Body&& body) {
  switch (type) {
    case CudaNumber::kFloat: body(float()); break;
    case CudaNumber::kDouble: body(double()); break;
    case CudaNumber::kBFloat16: body(__nv_bfloat16()); break;
    case CudaNumber::kHalf: body(__half()); break;
  }
  return cudaGetLastError();
}

template <int N>
struct Numbers {
  static constexpr int value = N;
};

// Calls body(S(), Numbers<N>()): N numbers fill 16 bytes if all of these distances and pointers are multiples
// of that, and are 1 otherwise.
template <typename Body>
int for_packs(CudaNumber type, std::initializer_list<int64_t> distances,
              std::initializer_list<const void*> pointers, Body&& body) {
  return for_type(type, [&](auto zero) {
    using S = decltype(zero);
    constexpr int kMost = 16 / sizeof(S);
    const bool whole =
        std::all_of(distances.begin(), distances.end(), [](int64_t n) { return n % kMost == 0; }) &&
        std::all_of(pointers.begin(), pointers.end(),
                    [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; });
    whole ? body(zero, Numbers<kMost>()) : body(zero, Numbers<1>());
  });
}

template <typename Body>
void for_gate(Gate gate, Body&& body) {
  switch (gate) {
    case Gate::kSilu: body(std::integral_constant<Gate, Gate::kSilu>()); break;
    case Gate::kGelu: body(std::integral_constant<Gate, Gate::kGelu>()); break;
    case Gate::kGeluTanh: body(std::integral_constant<Gate, Gate::kGeluTanh>()); break;
  }
}

unsigned blocks_of(int64_t threads) {
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}
cudaStream_t stream_of(const CudaRows& on) {
  return static_cast<cudaStream_t>(on.stream);
}
template <typename T>
const T* in(const void* pointer) {
  return static_cast<const T*>(pointer);
}
template <typename T>
T* out(void* pointer) {
  return static_cast<T*>(pointer);
}

}  // namespace

int cuda_rms_norm_forward(const CudaRows& on, const void* x, const void* gain, double eps, void* y,
                          void* rstd) {
  return for_packs(on.type, {on.cols}, {x, y}, [&](auto zero, auto n) {
    using S = decltype(zero);
    rms_norm_forward<n.value><<<on.rows, kThreads, 0, stream_of(on)>>>(
        on.cols, in<S>(x), in<Compute<S>>(gain), static_cast<Compute<S>>(eps), out<S>(y), out<Compute<S>>(rstd));
  });
}

int64_t cuda_gain_blocks(int64_t rows) {
  return (rows + kGainRows - 1) / kGainRows;
}

int cuda_rms_norm_backward(const CudaRows& on, const void* dy, const void* x, const void* gain,
                           const void* rstd, void* dx, void* dgain) {
  return for_packs(on.type, {on.cols}, {dy, x, dx}, [&](auto zero, auto n) {
    using S = decltype(zero);
    const dim3 blocks(cuda_gain_blocks(on.rows), (on.cols + kGainColumns - 1) / kGainColumns);
    rms_norm_dgain<<<blocks, kThreads, 0, stream_of(on)>>>(on.rows, on.cols, in<S>(dy), in<S>(x),
                                                           in<Compute<S>>(rstd), out<Compute<S>>(dgain));
    rms_norm_backward<n.value><<<on.rows, kThreads, 0, stream_of(on)>>>(
        on.cols, in<S>(dy), in<S>(x), in<Compute<S>>(gain), in<Compute<S>>(rstd), out<S>(dx));
  });
}

int cuda_layer_norm_forward(const CudaRows& on, const void* x, const void* gain, const void* bias, double eps,
                            void* y, void* statistics) {
  return for_packs(on.type, {on.cols}, {x, y}, [&](auto zero, auto n) {
    using S = decltype(zero);
    using T = Compute<S>;
    T* const means = out<T>(statistics);
    layer_norm_forward<n.value><<<on.rows, kThreads, 0, stream_of(on)>>>(
        on.cols, in<S>(x), in<T>(gain), in<T>(bias), static_cast<T>(eps), out<S>(y), means, means + on.rows);
  });
}

int cuda_layer_norm_backward(const CudaRows& on, const void* dy, const void* x, const void* gain,
                             const void* statistics, void* dx, void* sums) {
  return for_packs(on.type, {on.cols}, {dy, x, dx}, [&](auto zero, auto n) {
    using S = decltype(zero);
    using T = Compute<S>;
    const T* const means = in<T>(statistics);
    T* const dgain = out<T>(sums);
    const int64_t gain_blocks = cuda_gain_blocks(on.rows);
    const dim3 blocks(gain_blocks, (on.cols + kGainColumns - 1) / kGainColumns);
    layer_norm_sums<<<blocks, kThreads, 0, stream_of(on)>>>(on.rows, on.cols, in<S>(dy), in<S>(x), means,
                                                            means + on.rows, dgain, dgain + gain_blocks * on.cols);
    layer_norm_backward<n.value><<<on.rows, kThreads, 0, stream_of(on)>>>(
        on.cols, in<S>(dy), in<S>(x), in<T>(gain), means, means + on.rows, out<S>(dx));
  });
}

int cuda_rope(const CudaRows& on, const CudaRope& rope, void* x, const void* cos, const void* sin) {
  return for_packs(on.type, {rope.stride, rope.step, rope.first, rope.half}, {x}, [&](auto zero, auto n) {
    using S = decltype(zero);
    const int64_t count = on.rows * rope.heads * (rope.half / n.value);
    rotate<n.value><<<blocks_of(count), kThreads, 0, stream_of(on)>>>(count, rope, out<S>(x),
                                                                      in<Compute<S>>(cos), in<Compute<S>>(sin));
  });
}

int cuda_glu_forward(const CudaRows& on, Gate gate, const void* x, int64_t stride, void* act) {
  return for_packs(on.type, {on.cols, stride}, {x, act}, [&](auto zero, auto n) {
    using S = decltype(zero);
    const int64_t count = on.rows * (on.cols / n.value);
    for_gate(gate, [&](auto which) {
      glu_forward<which.value, n.value><<<blocks_of(count), kThreads, 0, stream_of(on)>>>(
          count, on.cols, in<S>(x), stride, out<S>(act));
    });
  });
}

int cuda_glu_backward(const CudaRows& on, Gate gate, const void* x, int64_t stride, const void* dact,
                      void* dx, int64_t dx_stride) {
  return for_packs(on.type, {on.cols, stride, dx_stride}, {x, dact, dx}, [&](auto zero, auto n) {
    using S = decltype(zero);
    const int64_t count = on.rows * (on.cols / n.value);
    for_gate(gate, [&](auto which) {
      glu_backward<which.value, n.value><<<blocks_of(count), kThreads, 0, stream_of(on)>>>(
          count, on.cols, in<S>(x), stride, in<S>(dact), out<S>(dx), dx_stride);
    });
  });
}

int cuda_cross_entropy(const CudaRows& on, void* logits, int64_t stride, const int64_t* targets,
                       int64_t ignore, double scale, const double* device_scale, bool gradient,
                       double* losses) {
  return for_packs(on.type, {on.cols, stride}, {logits}, [&](auto zero, auto n) {
    using S = decltype(zero);
    cross_entropy<n.value><<<on.rows, kThreads, 0, stream_of(on)>>>(
        on.cols, out<S>(logits), stride, targets, ignore, scale, device_scale, gradient, losses);
  });
}

int cuda_dropout_factors(const CudaRows& on, const DropoutMask& mask, const int64_t* rows, void* factors) {
  return for_type(on.type, [&](auto zero) {
    using S = decltype(zero);
    const int64_t count = on.rows * ((on.cols + 7) / 8);
    dropout_factors<<<blocks_of(count), kThreads, 0, stream_of(on)>>>(count, on.cols, mask, rows,
                                                                      out<S>(factors));
  });
}

int cuda_sums_of_squares(const CudaRows& on, const void* x, double* sums) {
  const int64_t count = on.rows * on.cols;
  const auto blocks = static_cast<unsigned>((count + kSquareBlock - 1) / kSquareBlock);
  return for_type(on.type, [&](auto zero) {
    using S = decltype(zero);
    sums_of_squares<<<blocks, kThreads, 0, stream_of(on)>>>(count, in<S>(x), sums);
  });
}

}  // namespace twobp
