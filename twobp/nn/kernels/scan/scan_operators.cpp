#include "twobp/nn/kernels/scan/scan_operators.h"

#include <algorithm>

#include "twobp/nn/kernels/rows/operators.h"
#include "twobp/nn/kernels/scan/scan_kernels.h"

namespace twobp::operators {
namespace {

constexpr double kLn2 = 0.69314718055994530942;

// Positions [first, first + count) of the input in the dtype of the computation, and the states after each.
struct Chunk {
  Chunk(const ScanTensors& in, int64_t first, int64_t count) {
    const auto part = [&](const at::Tensor& tensor) { return tensor.narrow(1, first, count); };
    const int64_t state = in.a.size(0);
    x = part(in.x);
    z = part(in.z);
    b = part(in.bc.narrow(2, 0, state)).unsqueeze(3);
    c = part(in.bc.narrow(2, state, state)).unsqueeze(3);
    raw = part(in.delta) + in.delta_bias;
    delta = at::softplus(raw);
    decay = at::exp2(delta.unsqueeze(2) * in.a);
    input = (delta * x).unsqueeze(2);
    states = at::empty_like(decay);
  }

  // Fills `states` and returns the state after the last position.
  at::Tensor advance(at::Tensor h) {
    const at::Tensor added = input * b;
    for (int64_t t = 0; t < states.size(1); ++t) {
      h = at::addcmul(added.select(1, t), decay.select(1, t), h);
      states.select(1, t).copy_(h);
    }
    return h;
  }

  // The output before the gate.
  at::Tensor output(const at::Tensor& d) const { return (states * c).sum(2).add_(x * d); }

  at::Tensor x, z, raw, delta;  // (batch, position, channels)
  at::Tensor b, c;              // (batch, position, state, 1)
  at::Tensor input;             // (batch, position, 1, channels): delta x
  at::Tensor decay, states;     // (batch, position, state, channels)
};

// 16-bit types are computed in float32, the only narrow type that the kernels for CUDA take.
bool is_narrow(const ScanTensors& in) {
  return in.x.scalar_type() != in.a.scalar_type();
}
ScanTensors widened(const ScanTensors& in) {
  return {wide(in.x), wide(in.delta), wide(in.z), wide(in.bc), in.a, in.d, in.delta_bias};
}

at::Tensor no_states(const ScanTensors& in) {
  return at::zeros({in.x.size(0), in.a.size(0), in.a.size(1)}, in.a.options());
}

// The sums before silu, and the input preceded by the zeros that the convolution reads.
struct ConvSums {
  ConvSums(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias)
      : padded(at::constant_pad_nd(wide(x), {0, 0, weight.size(0) - 1, 0})), sums(bias.expand(x.sizes()).clone()) {
    for (int64_t k = 0; k < weight.size(0); ++k) sums.addcmul_(padded.narrow(1, k, x.size(1)), weight[k]);
  }
  at::Tensor padded, sums;
};

}  // namespace

void scan_forward(const ScanTensors& in, const at::Tensor& out, const at::Tensor& borders, const at::Tensor& initial,
                  const at::Tensor& final) {
  if (is_narrow(in)) {
    const at::Tensor y = at::empty(out.sizes(), in.a.options());
    scan_forward(widened(in), y, borders, initial, final);
    out.copy_(y);
    return;
  }
  if (scan_forward_by_cuda(in, out, borders, initial, final)) return;
  const int64_t sequence = in.x.size(1);
  at::Tensor h = initial.defined() ? initial : no_states(in);
  for (int64_t first = 0; first < sequence; first += kScanChunk) {
    if (borders.defined() && first > 0) borders.select(1, first / kScanChunk - 1).copy_(h);
    const int64_t count = std::min(kScanChunk, sequence - first);
    Chunk chunk(in, first, count);
    h = chunk.advance(std::move(h));
    out.narrow(1, first, count).copy_(chunk.output(in.d).mul_(at::silu(chunk.z.contiguous())));
  }
  if (final.defined()) final.copy_(h);
}

void scan_backward(const ScanTensors& in, const at::Tensor& dout, const at::Tensor& borders,
                   const ScanGradientTensors& out) {
  if (is_narrow(in)) {
    ScanGradientTensors of = out;
    for (at::Tensor* gradient : {&of.dx, &of.ddelta, &of.dz}) *gradient = at::empty(gradient->sizes(), in.a.options());
    scan_backward(widened(in), wide(dout), borders, of);
    out.dx.copy_(of.dx);
    out.ddelta.copy_(of.ddelta);
    out.dz.copy_(of.dz);
    return;
  }
  const bool goes_on = out.initial.defined() || out.dfinal.defined() || out.dinitial.defined();
  if (!goes_on && scan_backward_by_cuda(in, dout, borders, out)) return;
  const int64_t sequence = in.x.size(1);
  const int64_t state = in.a.size(0);
  at::Tensor g = out.dfinal.defined() ? out.dfinal : no_states(in);  // dL/dh from the positions after the current one
  for (const at::Tensor* sum : {&out.da, &out.dd, &out.ddelta_bias}) sum->zero_();
  for (int64_t index = (sequence - 1) / kScanChunk; index >= 0; --index) {
    const int64_t first = index * kScanChunk;
    const int64_t count = std::min(kScanChunk, sequence - first);
    Chunk chunk(in, first, count);
    const at::Tensor before = index > 0               ? borders.select(1, index - 1)
                              : out.initial.defined() ? out.initial
                                                      : no_states(in);
    chunk.advance(before);
    const at::Tensor gradient_out = dout.narrow(1, first, count);
    const at::Tensor gate = chunk.z.contiguous();
    const at::Tensor dy = gradient_out * at::silu(gate);
    const at::Tensor dz = at::silu_backward(gradient_out * chunk.output(in.d), gate);
    // dL/dh of every position. The loop adds the share of later positions.
    const at::Tensor gradient = dy.unsqueeze(2) * chunk.c;
    for (int64_t t = count - 1; t >= 0; --t) {
      const at::Tensor here = gradient.select(1, t).add_(g);
      g = here * chunk.decay.select(1, t);
    }
    // The contribution of the previous state to each position: decay times that state.
    const at::Tensor carried =
        at::cat({before.unsqueeze(1), chunk.states.narrow(1, 0, count - 1)}, 1).mul_(chunk.decay);
    const at::Tensor of_decay = gradient * carried;
    const at::Tensor of_b = (gradient * chunk.b).sum(2);
    out.da.add_((of_decay * chunk.delta.unsqueeze(2)).sum(1));
    const at::Tensor ddelta = (chunk.x * of_b).add_((of_decay * in.a).sum(2), kLn2).mul_(at::sigmoid(chunk.raw));
    const at::Tensor db = (gradient * chunk.input).sum(3);
    const at::Tensor dc = (chunk.states * dy.unsqueeze(2)).sum(3);
    out.dd.add_((dy * chunk.x).sum(1));
    out.ddelta_bias.add_(ddelta.sum(1));
    const at::Tensor dx = (dy * in.d).addcmul_(chunk.delta, of_b);
    out.dbc.narrow(2, 0, state).narrow(1, first, count).copy_(db);
    out.dbc.narrow(2, state, state).narrow(1, first, count).copy_(dc);
    out.dx.narrow(1, first, count).copy_(dx);
    out.ddelta.narrow(1, first, count).copy_(ddelta);
    out.dz.narrow(1, first, count).copy_(dz);
  }
  if (out.dinitial.defined()) out.dinitial.copy_(g);
}

void conv_forward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& y) {
  y.copy_(at::silu(ConvSums(x, weight, bias).sums));
}

void conv_backward(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& dy,
                   const at::Tensor& dx, const at::Tensor& dw, const at::Tensor& dbias) {
  const int64_t kernel = weight.size(0);
  const int64_t sequence = x.size(1);
  const ConvSums of(x, weight, bias);
  const at::Tensor dsum = at::silu_backward(wide(dy).contiguous(), of.sums);
  dbias.copy_(dsum.sum(1));
  const at::Tensor after = at::constant_pad_nd(dsum, {0, 0, 0, kernel - 1});
  at::Tensor gradient = at::zeros_like(dsum);
  for (int64_t k = 0; k < kernel; ++k) {
    dw.select(1, k).copy_((dsum * of.padded.narrow(1, k, sequence)).sum(1));
    gradient.addcmul_(after.narrow(1, kernel - 1 - k, sequence), weight[k]);
  }
  dx.copy_(gradient);
}

}  // namespace twobp::operators
