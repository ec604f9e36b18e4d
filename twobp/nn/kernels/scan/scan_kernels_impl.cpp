// The kernels of scan_kernels.h, compiled once per instruction set (TWOBP_ISA names it). A vector holds neighbouring
// channels, so the recurrence over positions and the sums over states need no step across lanes. Only dB and dC, which
// are sums over channels, need one, once per chunk.
#include "twobp/nn/kernels/scan/scan_kernels.h"
#include "twobp/nn/kernels/vectors.h"

namespace twobp {
namespace {

// The scratch memory of a call on a group of channels, cut from the caller's memory. Arrays of (position, block) have
// the order of the tensors. Their rows are read and written whole, because reading one vector per row would miss the
// caches.
template <typename T>
struct Scratch {
  using V = Vector<T>;
  static constexpr int64_t kBlocks = kScanGroup / kLanes<T>;
  // The gap between two arrays, in vectors. Most arrays are whole pages long, and a load waits for a store at a
  // distance that is a multiple of 4 KiB.
  static constexpr int64_t kStagger = 5;

  // Without memory, only `used` is valid.
  Scratch(void* memory, int64_t state) : all(static_cast<V*>(memory)) {
    const int64_t of_chunk = kScanChunk * state;
    for (V** one : {&a, &start}) *one = take(state);
    states = take(kBlocks * state);
    da = take(kBlocks * state);
    for (V** one : {&decay, &carried, &db, &dc}) *one = take(of_chunk);
    for (V** one : {&delta, &slope, &x, &y, &dy, &dz}) *one = take(kScanChunk * kBlocks);
    for (T** one : {&b, &c}) *one = reinterpret_cast<T*>(take((of_chunk + kLanes<T> - 1) / kLanes<T>));
  }
  V* take(int64_t count) {
    V* const taken = all == nullptr ? nullptr : all + used;
    used += count + kStagger;
    return taken;
  }

  V* all;
  int64_t used = 0;
  V* a;        // (state), of the current block
  V* start;    // (state): h at the border before the chunk
  V* states;   // (block, state): h, or in the backward pass dL/dh from later positions
  V* da;       // (block, state)
  V* decay;    // (position, state): 2^(delta a)
  V* carried;  // (position, state): decay * h of the previous position
  V* db;       // (position, state): sums over the blocks so far, lane by lane
  V* dc;
  V* delta;  // (position, block): after softplus; finally ddelta
  V* slope;  // of softplus
  V* x;      // finally dx
  V* y;      // before the gate
  V* dy;     // of y
  V* dz;     // dz / y
  T* b;      // (position, state)
  T* c;
};

template <typename S, typename T = Compute<S>>
int64_t scratch_bytes(const ScanSize& size) {
  return Scratch<T>(nullptr, size.state).used * kVectorBytes;
}

template <typename T>
inline void clear(Vector<T>* vectors, int64_t count) {
  for (int64_t i = 0; i < count; ++i) vectors[i] = Vector<T>{};
}

template <typename S, typename T = Compute<S>>
void widen_rows(Rows<const S> from, int64_t begin, int64_t end, int64_t cols, T* to) {
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t n = 0; n < cols; ++n) *to++ = load(from.data[t * from.stride + n]);
  }
}

// A block of channels: the lanes of one vector. The last block may have fewer.
template <typename T>
struct Block {
  int64_t channel = 0;
  int64_t lanes = 0;

  Block(int64_t index, int64_t begin, int64_t end)
      : channel(begin + index * kLanes<T>), lanes(std::min(kLanes<T>, end - channel)) {}
};

// Calls visit(block, t, i), where vector i of the scratch belongs to position t, row after row.
template <typename T, typename Visit>
inline void for_rows(int64_t begin, int64_t end, int64_t first, int64_t last, Visit&& visit) {
  const int64_t blocks = (end - begin + kLanes<T> - 1) / kLanes<T>;
  for (int64_t t = first; t < last; ++t) {
    for (int64_t i = 0; i < blocks; ++i) {
      visit(Block<T>(i, begin, end), t, (t - first) * Scratch<T>::kBlocks + i);
    }
  }
}

template <typename S, typename T = Compute<S>>
inline Vector<T> load_at(Rows<S> rows, int64_t t, const Block<T>& block) {
  return load_lanes(rows.data + t * rows.stride + block.channel, block.lanes);
}
template <typename S, typename T = Compute<S>>
inline void store_at(Rows<S> rows, int64_t t, const Block<T>& block, Vector<T> v) {
  store_lanes<S>(rows.data + t * rows.stride + block.channel, v, block.lanes);
}

template <typename S, typename T>
inline void load_rates(const ScanInput<S>& in, const Block<T>& block, const Scratch<T>& s) {
  for (int64_t n = 0; n < in.size.state; ++n) {
    s.a[n] = load_lanes(in.a + n * in.size.channels + block.channel, block.lanes);
  }
}

// States whose decays are computed together.
constexpr int kAtOnce = 4;

// The recurrence over a chunk's positions for one block. Reads s.delta and s.x, writes s.y and, with `record`, s.decay
// and s.carried. Call load_rates first.
template <bool record, typename S, typename T>
inline void scan_block(const ScanInput<S>& in, const Block<T>& block, int64_t index, int64_t positions,
                       Vector<T>* __restrict h, const Scratch<T>& s) {
  using V = Vector<T>;
  const int64_t state = in.size.state;
  const V d = load_lanes(in.d + block.channel, block.lanes);
  for (int64_t i = 0; i < positions; ++i) {
    const int64_t at = i * Scratch<T>::kBlocks + index;
    const V delta = s.delta[at];
    const V input = delta * s.x[at];
    const V* __restrict a = s.a;
    const T* __restrict b = s.b + i * state;
    const T* __restrict c = s.c + i * state;
    V* __restrict decay = s.decay + i * state;
    V* __restrict carried = s.carried + i * state;
    V y = d * s.x[at];
    const auto next = [&](int64_t n, V factor) {
      const V before = factor * h[n];
      if constexpr (record) {
        decay[n] = factor;
        carried[n] = before;
      }
      h[n] = before + input * b[n];
      y += h[n] * c[n];
    };
    int64_t n = 0;
    for (; n + kAtOnce <= state; n += kAtOnce) {
      Vectors<T, kAtOnce> exponents;
      for (int k = 0; k < kAtOnce; ++k) exponents.v[k] = delta * a[n + k];
      const Vectors<T, kAtOnce> factors = exp2(exponents);
      for (int k = 0; k < kAtOnce; ++k) next(n + k, factors.v[k]);
    }
    for (; n < state; ++n) next(n, exp2(delta * a[n]));
    s.y[at] = y;
  }
}

template <typename S, typename T = Compute<S>>
void scan_forward(const ScanInput<S>& in, const ScanOutput<S>& out, int64_t begin, int64_t end, void* memory) {
  using V = Vector<T>;
  const int64_t state = in.size.state;
  const int64_t channels = in.size.channels;
  const int64_t blocks = (end - begin + kLanes<T> - 1) / kLanes<T>;
  const Scratch<T> s(memory, state);
  for (int64_t first = 0; first < in.size.sequence; first += kScanChunk) {
    const int64_t last = std::min(first + kScanChunk, in.size.sequence);
    widen_rows(in.b, first, last, state, s.b);
    widen_rows(in.c, first, last, state, s.c);
    for_rows<T>(begin, end, first, last, [&](const Block<T>& block, int64_t t, int64_t at) {
      const V bias = load_lanes(in.delta_bias + block.channel, block.lanes);
      s.delta[at] = softplus<T>(load_at(in.delta, t, block) + bias).value;
      s.x[at] = load_at(in.x, t, block);
    });
    T* const border =
        out.borders != nullptr && first > 0 ? out.borders + (first / kScanChunk - 1) * state * channels : nullptr;
    for (int64_t i = 0; i < blocks; ++i) {
      const Block<T> block(i, begin, end);
      V* const h = s.states + i * state;
      for (int64_t n = 0; n < state; ++n) {
        const int64_t at = n * channels + block.channel;
        if (first == 0) h[n] = out.initial == nullptr ? V{} : load_lanes(out.initial + at, block.lanes);
        if (border != nullptr) store_lanes(border + at, h[n], block.lanes);
      }
      load_rates(in, block, s);
      scan_block<false>(in, block, i, last - first, h, s);
      if (last < in.size.sequence || out.final == nullptr) continue;
      for (int64_t n = 0; n < state; ++n) {
        store_lanes(out.final + n * channels + block.channel, h[n], block.lanes);
      }
    }
    for_rows<T>(begin, end, first, last, [&](const Block<T>& block, int64_t t, int64_t at) {
      const V z = load_at(in.z, t, block);
      store_at(out.out, t, block, s.y[at] * z * sigmoid_of<T>(z));
    });
  }
}

// The backward pass over a chunk's positions for one block. Reads s.dy and the arrays that scan_block recorded. Writes
// ddelta and dx over delta and x, and adds to the sums. On entry `g` is dL/dh from the positions after the chunk; on
// return it includes the chunk's positions.
template <typename S, typename T = Compute<S>>
inline void reverse_block(const ScanInput<S>& in, const ScanGradient<S>& out, const Block<T>& block, int64_t index,
                          int64_t positions, Vector<T>* __restrict g, Vector<T>* __restrict da, const Scratch<T>& s) {
  using V = Vector<T>;
  const int64_t state = in.size.state;
  const V d = load_lanes(in.d + block.channel, block.lanes);
  V dd = load_lanes(out.dd + block.channel, block.lanes);
  V dbias = load_lanes(out.ddelta_bias + block.channel, block.lanes);
  for (int64_t i = positions - 1; i >= 0; --i) {
    const int64_t at = i * Scratch<T>::kBlocks + index;
    const V delta = s.delta[at];
    const V x = s.x[at];
    const V dy = s.dy[at];
    const V input = delta * x;
    const V* __restrict a = s.a;
    const T* __restrict b = s.b + i * state;
    const T* __restrict c = s.c + i * state;
    const V* __restrict decay = s.decay + i * state;
    const V* __restrict carried = s.carried + i * state;
    V* __restrict db = s.db + i * state;
    V* __restrict dc = s.dc + i * state;
    V of_b = {};  // dL/dh . B
    V of_a = {};  // the sum of dL/dh * carried * a
    for (int64_t n = 0; n < state; ++n) {
      const V gradient = dy * c[n] + g[n];
      const V of_decay = gradient * carried[n];
      of_b += gradient * b[n];
      of_a += of_decay * a[n];
      da[n] += of_decay * delta;
      db[n] += gradient * input;
      dc[n] += dy * (input * b[n] + carried[n]);
      g[n] = decay[n] * gradient;
    }
    const V ddelta = (x * of_b + of_a * T(kLn2)) * s.slope[at];
    s.x[at] = dy * d + delta * of_b;
    s.delta[at] = ddelta;
    dd += dy * x;
    dbias += ddelta;
  }
  store_lanes(out.dd + block.channel, dd, block.lanes);
  store_lanes(out.ddelta_bias + block.channel, dbias, block.lanes);
}

template <typename S, typename T = Compute<S>>
void scan_backward(const ScanInput<S>& in, const ScanGradient<S>& out, int64_t begin, int64_t end, void* memory) {
  using V = Vector<T>;
  const int64_t state = in.size.state;
  const int64_t channels = in.size.channels;
  const int64_t blocks = (end - begin + kLanes<T> - 1) / kLanes<T>;
  const Scratch<T> s(memory, state);
  clear<T>(s.states, blocks * state);
  for (int64_t i = 0; out.dfinal != nullptr && i < blocks; ++i) {
    const Block<T> block(i, begin, end);
    for (int64_t n = 0; n < state; ++n) {
      s.states[i * state + n] = load_lanes(out.dfinal + n * channels + block.channel, block.lanes);
    }
  }
  clear<T>(s.da, blocks * state);
  std::fill(out.dd + begin, out.dd + end, T(0));
  std::fill(out.ddelta_bias + begin, out.ddelta_bias + end, T(0));
  for (int64_t chunk = in.size.borders(); chunk >= 0; --chunk) {
    const int64_t first = chunk * kScanChunk;
    const int64_t last = std::min(first + kScanChunk, in.size.sequence);
    widen_rows(in.b, first, last, state, s.b);
    widen_rows(in.c, first, last, state, s.c);
    for_rows<T>(begin, end, first, last, [&](const Block<T>& block, int64_t t, int64_t at) {
      const V bias = load_lanes(in.delta_bias + block.channel, block.lanes);
      const Softplus<T> soft = softplus<T>(load_at(in.delta, t, block) + bias);
      s.delta[at] = soft.value;
      s.slope[at] = soft.slope;
      s.x[at] = load_at(in.x, t, block);
      const V z = load_at(in.z, t, block);
      const V dout = load_at(out.dout, t, block);
      const V gate = sigmoid_of<T>(z);
      const V silu = z * gate;
      s.dy[at] = dout * silu;
      s.dz[at] = dout * (gate + silu * (T(1) - gate));
    });
    const int64_t positions = last - first;
    clear<T>(s.db, positions * state);
    clear<T>(s.dc, positions * state);
    for (int64_t i = 0; i < blocks; ++i) {
      const Block<T> block(i, begin, end);
      load_rates(in, block, s);
      for (int64_t n = 0; n < state; ++n) {
        const T* const before = chunk > 0 ? out.borders + (chunk - 1) * state * channels : out.initial;
        s.start[n] = before == nullptr ? V{} : load_lanes(before + n * channels + block.channel, block.lanes);
      }
      scan_block<true>(in, block, i, positions, s.start, s);
      reverse_block(in, out, block, i, positions, s.states + i * state, s.da + i * state, s);
    }
    T* row = out.dbc + first * 2 * state;
    for (int64_t i = 0; i < positions; ++i, row += 2 * state) {
      for (int64_t n = 0; n < state; ++n) {
        row[n] = sum_of_lanes<T>(s.db[i * state + n]);
        row[state + n] = sum_of_lanes<T>(s.dc[i * state + n]);
      }
    }
    for_rows<T>(begin, end, first, last, [&](const Block<T>& block, int64_t t, int64_t at) {
      store_at(out.dx, t, block, s.x[at]);
      store_at(out.ddelta, t, block, s.delta[at]);
      store_at(out.dz, t, block, s.dz[at] * s.y[at]);
    });
  }
  for (int64_t i = 0; i < blocks; ++i) {
    const Block<T> block(i, begin, end);
    for (int64_t n = 0; n < state; ++n) {
      store_lanes(out.da + n * channels + block.channel, s.da[i * state + n], block.lanes);
      if (out.dinitial == nullptr) continue;
      store_lanes(out.dinitial + n * channels + block.channel, s.states[i * state + n], block.lanes);
    }
  }
}

// The convolution's sum at position t, before silu.
template <typename S, typename T = Compute<S>>
inline Vector<T> conv_sum(const ConvInput<S>& in, int64_t t, const Block<T>& block) {
  Vector<T> sum = load_lanes(in.bias + block.channel, block.lanes);
  for (int64_t k = std::max<int64_t>(0, in.kernel - 1 - t); k < in.kernel; ++k) {
    const Vector<T> weight = load_lanes(in.weight + k * in.channels + block.channel, block.lanes);
    sum += weight * load_at(in.x, t - in.kernel + 1 + k, block);
  }
  return sum;
}

template <typename S, typename T = Compute<S>>
void conv_forward(const ConvInput<S>& in, Rows<S> y, int64_t begin, int64_t end) {
  const int64_t blocks = (in.channels + kLanes<T> - 1) / kLanes<T>;
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t i = 0; i < blocks; ++i) {
      const Block<T> block(i, 0, in.channels);
      const Vector<T> sum = conv_sum(in, t, block);
      store_at(y, t, block, sum * sigmoid_of<T>(sum));
    }
  }
}

// Goes from the last position to the first. dx at t needs the gradients of the sums at t .. t + K - 1, which are kept
// in a ring. Those need x only at positions up to t, so dx may overwrite x.
template <typename S, typename T = Compute<S>>
void conv_backward(const ConvInput<S>& in, Rows<const S> dy, Rows<S> dx, T* dw, T* dbias, int64_t begin, int64_t end) {
  using V = Vector<T>;
  constexpr int64_t kBlocks = kScanGroup / kLanes<T>;
  const int64_t blocks = (end - begin + kLanes<T> - 1) / kLanes<T>;
  const int64_t kernel = in.kernel;
  V ring[kMaxConvKernel][kBlocks] = {};  // gradient of the sum at t in ring[t % K]
  V dw_sum[kMaxConvKernel][kBlocks] = {};
  V dbias_sum[kBlocks] = {};
  for (int64_t t = in.sequence - 1; t >= 0; --t) {
    const V* of_output[kMaxConvKernel];  // gradient of the sum to which weight k adds x at t
    for (int64_t k = 0; k < kernel; ++k) of_output[k] = ring[(t + kernel - 1 - k) % kernel];
    V* const of_t = ring[t % kernel];
    const int64_t earliest = std::max<int64_t>(0, kernel - 1 - t);
    const int64_t latest = std::max<int64_t>(0, kernel - in.sequence + t);
    for (int64_t i = 0; i < blocks; ++i) {
      const Block<T> block(i, begin, end);
      const V sum = conv_sum(in, t, block);
      const V gate = sigmoid_of<T>(sum);
      const V dsum = load_at(dy, t, block) * (gate + sum * gate * (T(1) - gate));
      of_t[i] = dsum;
      dbias_sum[i] += dsum;
      for (int64_t k = earliest; k < kernel; ++k) {
        dw_sum[k][i] += dsum * load_at(in.x, t - kernel + 1 + k, block);
      }
      V gradient = {};
      for (int64_t k = latest; k < kernel; ++k) {
        gradient += load_lanes(in.weight + k * in.channels + block.channel, block.lanes) * of_output[k][i];
      }
      store_at(dx, t, block, gradient);
    }
  }
  for (int64_t i = 0; i < blocks; ++i) {
    const Block<T> block(i, begin, end);
    store_lanes(dbias + block.channel, dbias_sum[i], block.lanes);
    for (int64_t k = 0; k < kernel; ++k) {
      store_lanes(dw + k * in.channels + block.channel, dw_sum[k][i], block.lanes);
    }
  }
}

template <typename S>
constexpr ScanKernels<S> table() {
  return {scratch_bytes<S>, scan_forward<S>, scan_backward<S>, conv_forward<S>, conv_backward<S>};
}

}  // namespace

namespace TWOBP_ISA {
const KernelTable<ScanKernels> scan_kernels_table = {table<float>(), table<double>(), table<BFloat16>(), table<Half>()};
}  // namespace TWOBP_ISA

}  // namespace twobp
