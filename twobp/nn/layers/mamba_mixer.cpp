#include "twobp/nn/layers/mamba_mixer.h"

#include <cmath>

#include "twobp/core/check.h"
#include "twobp/nn/layers/attention_inputs.h"

namespace twobp {
namespace {

enum MixerChild : uint8_t { kConv, kXProj, kDtProj, kScan, kOutProj };

// Draws from the uniform distribution between -bound and bound, as transformers does for some of the projections.
void start_uniform(Layer& layer, const std::string& name, double bound) {
  for (Parameter* parameter : parameters_of(layer)) {
    if (parameter->name() != name) continue;  // skips an adapter
    parameter->initialize_with(
        [bound](at::Tensor& rows, at::Generator& generator) { rows.uniform_(-bound, bound, generator); });
  }
}

at::Tensor only(Values values) {
  return std::move(values[0]);
}

// Sets the rows of x (B, S, C) at the padding (B, S) to 0.
void clear(const at::Tensor& x, const at::Tensor& padding) {
  if (padding.defined()) x.masked_fill_(padding.unsqueeze(2), 0);
}

// The padding at the positions of this call.
at::Tensor own_padding(const Context& context, int64_t batch, int64_t positions, at::Device device) {
  const int64_t past = context.sliced() ? context.past : 0;
  const at::Tensor padding = padding_of(context, batch, past + positions, device);
  return padding.defined() ? padding.narrow(1, past, positions) : padding;
}

}  // namespace

MambaMixer::MambaMixer(const std::string& name, const MambaMixerShape& shape, double init_std, at::ScalarType dtype,
                       const LoraOptions& lora)
    : shape_(shape),
      conv_(name + ".conv1d", shape.inner, shape.conv_kernel, dtype),
      x_proj_(make_linear(
          {{name + ".x_proj.weight", shape.dt_rank + 2 * shape.state, {{shape.dt_rank, shape.state, shape.state}}}},
          shape.inner, init_std, dtype, lora)),
      dt_proj_(make_linear({{name + ".dt_proj.weight", shape.inner}}, shape.dt_rank, init_std, dtype, lora)),
      scan_(name, shape.inner, shape.state, dtype),
      out_proj_(make_linear({{name + ".out_proj.weight", shape.dim}}, shape.inner, init_std, dtype, lora)) {
  start_uniform(*dt_proj_, name + ".dt_proj.weight", 1 / std::sqrt(static_cast<double>(shape.dt_rank)));
  start_uniform(*out_proj_, name + ".out_proj.weight", 1 / std::sqrt(static_cast<double>(shape.inner)));
}

Values MambaMixer::forward(Values values, Context& context, Saved& saved) {
  at::Tensor uz = std::move(values[0]);
  const int64_t inner = shape_.inner;
  TWOBP_CHECK(uz.dim() == 3 && uz.size(2) == 2 * inner, "MambaMixer takes (batch, sequence, ", 2 * inner, "), got ",
              uz.sizes());
  const at::Tensor padding = own_padding(context, uz.size(0), uz.size(1), uz.device());
  if (padding.defined() && !exclusively_owned(uz)) uz = uz.clone();
  const bool ours = exclusively_owned(uz);
  clear(uz, padding);
  at::Tensor u = only(conv_.forward({uz.narrow(2, 0, inner)}, context, saved.child(kConv)));
  clear(u, padding);
  const at::Tensor projected = only(x_proj_->forward({u}, context, saved.child(kXProj)));
  // This is a copy, so that W does not keep B and C alive.
  at::Tensor dt = at::empty({u.size(0), u.size(1), shape_.dt_rank}, u.options());
  dt.copy_(projected.narrow(2, 0, shape_.dt_rank));
  at::Tensor raw = only(dt_proj_->forward({std::move(dt)}, context, saved.child(kDtProj)));
  at::Tensor y = only(scan_.forward(
      {std::move(u), std::move(raw), projected.narrow(2, shape_.dt_rank, 2 * shape_.state), uz.narrow(2, inner, inner)},
      context, saved.child(kScan)));
  if (context.keeps() && ours) saved.keep_until_p1(std::move(uz));
  return out_proj_->forward({std::move(y)}, context, saved.child(kOutProj));
}

Values MambaMixer::backward_p1(Values dy, Context& context, Saved& saved) {
  const int64_t inner = shape_.inner;
  const std::vector<int64_t> sizes = {dy[0].size(0), dy[0].size(1), 2 * inner};
  const at::TensorOptions options = dy[0].options();
  const at::Tensor padding = own_padding(context, sizes[0], sizes[1], dy[0].device());
  at::Tensor gradient = only(out_proj_->backward_p1(std::move(dy), context, saved.child(kOutProj)));
  // If no other object holds (u | z), its gradient overwrites it.
  at::Tensor duz = saved.p1_count() > 0 ? saved.take_p1(0) : at::empty(sizes, options);
  at::Tensor dprojected = at::empty({sizes[0], sizes[1], shape_.dt_rank + 2 * shape_.state}, options);
  Values of_scan = scan_.backward_p1_into(std::move(gradient), dprojected.narrow(2, shape_.dt_rank, 2 * shape_.state),
                                          duz.narrow(2, inner, inner), saved.child(kScan));
  saved.child(kScan).release_p1();
  dprojected.narrow(2, 0, shape_.dt_rank)
      .copy_(only(dt_proj_->backward_p1({std::move(of_scan[1])}, context, saved.child(kDtProj))));
  at::Tensor du = std::move(of_scan[0]);
  of_scan.clear();
  du.add_(only(x_proj_->backward_p1({std::move(dprojected)}, context, saved.child(kXProj))));
  clear(du, padding);
  conv_.backward_p1_into(duz.narrow(2, 0, inner), std::move(du), context, saved.child(kConv));
  saved.child(kConv).release_p1();
  clear(duz, padding);
  return {std::move(duz)};
}

void MambaMixer::collect_p2(Saved& saved, std::vector<P2Unit>& units) {
  out_proj_->collect_p2(saved.child(kOutProj), units);
  dt_proj_->collect_p2(saved.child(kDtProj), units);
  x_proj_->collect_p2(saved.child(kXProj), units);
}

void MambaMixer::collect_parameters(std::vector<Parameter*>& parameters) {
  conv_.collect_parameters(parameters);
  x_proj_->collect_parameters(parameters);
  dt_proj_->collect_parameters(parameters);
  scan_.collect_parameters(parameters);
  out_proj_->collect_parameters(parameters);
}

}  // namespace twobp
