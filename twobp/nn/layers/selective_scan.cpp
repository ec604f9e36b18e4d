#include <cmath>

#include "twobp/nn/kernels/rows/operators.h"
#include "twobp/nn/kernels/scan/scan_operators.h"
#include "twobp/nn/layers/mamba_mixer.h"

namespace twobp {
namespace {

constexpr double kLog2E = 1.44269504088896340736;

// The steps delta of the initial biases are log-uniform between these bounds (section 3.6 of the paper).
constexpr double kSmallestStep = 0.001;
constexpr double kLargestStep = 0.1;
constexpr double kStepFloor = 1e-4;

// bias = softplus^-1(delta).
void initialize_bias(at::Tensor& rows, at::Generator& generator) {
  rows.uniform_(std::log(kSmallestStep), std::log(kLargestStep), generator);
  const at::Tensor delta = rows.exp().clamp_min(kStepFloor);
  rows.copy_(delta + (-(-delta).expm1()).log());
}

template <typename S>
ScanInput<S> input_of(const ScanTensors& in, int64_t sequence) {
  using T = Compute<S>;
  const int64_t state = in.a.size(0);
  const Rows<const S> b = rows_of<const S>(in.bc, sequence);
  return {{in.x.size(1), in.x.size(2), state},
          rows_of<const S>(in.x, sequence),
          rows_of<const S>(in.delta, sequence),
          rows_of<const S>(in.z, sequence),
          b,
          {b.data + state, b.stride},
          numbers<T>(in.a),
          numbers<T>(in.d),
          numbers<T>(in.delta_bias)};
}

// Calls body(sequence, first channel, end, scratch) for each group of channels. The groups are split over threads.
template <typename S, typename Body>
void for_groups(int64_t batch, const ScanSize& size, Body&& body) {
  at::parallel_for(0, batch * size.groups(), 1, [&](int64_t begin, int64_t end) {
    const at::Tensor scratch = at::empty({scan_kernels<S>().scratch_bytes(size)}, at::TensorOptions().dtype(at::kByte));
    for (int64_t task = begin; task < end; ++task) {
      const int64_t channel = task % size.groups() * kScanGroup;
      body(task / size.groups(), channel, std::min(channel + kScanGroup, size.channels), scratch.mutable_data_ptr());
    }
  });
}

}  // namespace

SelectiveScan::SelectiveScan(const std::string& mixer, int64_t channels, int64_t state, at::ScalarType dtype)
    : a_log_({{mixer + ".A_log", channels}}, {channels, state}, compute_type(dtype), 0),
      d_({{mixer + ".D", channels}}, {channels}, compute_type(dtype), 0, 1),
      bias_({{mixer + ".dt_proj.bias", channels}}, {channels}, compute_type(dtype), 0),
      dtype_(dtype),
      channels_(channels),
      state_(state) {
  TWOBP_CHECK(channels >= 1 && state >= 1, "SelectiveScan ", mixer, " has ", channels, " channels and ", state,
              " states, but needs at least one of each");
  a_log_.never_decay();
  a_log_.initialize_with(
      [state](at::Tensor& rows, at::Generator&) { rows.copy_(at::arange(1, state + 1, rows.options()).log()); });
  bias_.initialize_with(initialize_bias);
}

void SelectiveScan::check(const ScanTensors& inputs) const {
  const at::Tensor& x = inputs.x;
  TWOBP_CHECK(x.dim() == 3 && x.size(2) == channels_, "SelectiveScan ", a_log_.name(), " takes (batch, sequence, ",
              channels_, "), got ", x.sizes());
  TWOBP_CHECK(inputs.delta.sizes() == x.sizes() && inputs.z.sizes() == x.sizes(), "SelectiveScan ", a_log_.name(),
              " takes x, delta and z of one shape, got ", x.sizes(), ", ", inputs.delta.sizes(), " and ",
              inputs.z.sizes());
  TWOBP_CHECK(inputs.bc.dim() == 3 && inputs.bc.size(0) == x.size(0) && inputs.bc.size(1) == x.size(1) &&
                  inputs.bc.size(2) == 2 * state_,
              "SelectiveScan ", a_log_.name(), " takes B and C as (", x.size(0), ", ", x.size(1), ", ", 2 * state_,
              "), got ", inputs.bc.sizes());
  for (const at::Tensor* one : {&x, &inputs.delta, &inputs.bc, &inputs.z}) {
    TWOBP_CHECK(one->scalar_type() == dtype_, "SelectiveScan ", a_log_.name(), " has dtype ", c10::toString(dtype_),
                ", got ", c10::toString(one->scalar_type()));
  }
}

at::Tensor SelectiveScan::rates() const {
  return a_log_.value.exp().neg_();
}
at::Tensor SelectiveScan::scaled(const at::Tensor& rates) const {
  return (rates * kLog2E).t().contiguous();
}

Values SelectiveScan::forward(Values values, Context& context, Saved& saved) {
  TWOBP_CHECK(values.size() == 4, "SelectiveScan ", a_log_.name(), " takes x, delta, (B | C) and z, got ",
              values.size(), " tensors");
  for (at::Tensor& value : values) value = with_dense_rows(std::move(value));
  ScanTensors in = {std::move(values[0]), std::move(values[1]), std::move(values[3]),
                    std::move(values[2]), scaled(rates()),      d_.value,
                    bias_.value};
  check(in);
  const ScanSize size = {in.x.size(1), channels_, state_};
  const int64_t batch = in.x.size(0);
  at::Tensor y = at::empty(in.x.sizes(), in.x.options());
  at::Tensor borders;
  if (context.keeps()) borders = at::empty({batch, size.borders(), state_, channels_}, in.a.options());
  at::Tensor states;
  const at::Tensor before = states_before(saved);
  if (context.sliced()) {
    states = before.defined() ? before.clone() : at::empty({batch, state_, channels_}, in.a.options());
    saved.to_later = {states};
  }
  const bool from_states = before.defined();
  if (by_operators(in.x)) {
    operators::scan_forward(in, y, borders, from_states ? states : at::Tensor(), states);
  } else {
    forward_groups(in, y, borders, states, from_states);
  }
  if (context.keeps()) {
    saved.keep_until_p1(std::move(in.x));
    saved.keep_until_p1(std::move(in.delta));
    saved.keep_until_p1(std::move(in.bc));
    saved.keep_until_p1(std::move(in.z));
    saved.keep_until_p1(std::move(borders));
  }
  return {std::move(y)};
}

at::Tensor SelectiveScan::states_before(const Saved& saved) const {
  if (saved.previous() == nullptr) return {};
  TWOBP_CHECK(saved.previous()->to_later.size() == 1, "SelectiveScan ", a_log_.name(),
              " over a slice does not find the final states of the previous slice");
  return saved.previous()->to_later[0];
}

void SelectiveScan::forward_groups(const ScanTensors& in, const at::Tensor& y, const at::Tensor& borders,
                                   const at::Tensor& cache, bool going_on) const {
  const ScanSize size = {in.x.size(1), channels_, state_};
  dispatch_float(dtype_, "SelectiveScan", [&](auto zero) {
    using S = decltype(zero);
    using T = Compute<S>;
    for_groups<S>(in.x.size(0), size, [&](int64_t sequence, int64_t begin, int64_t end, void* scratch) {
      const auto of_sequence = [&](const at::Tensor& t) {
        return t.defined() && t.numel() > 0 ? mutable_numbers<T>(t) + sequence * t.stride(0) : nullptr;
      };
      T* const states = of_sequence(cache);
      const ScanOutput<S> out = {rows_of<S>(y, sequence), of_sequence(borders), going_on ? states : nullptr, states};
      scan_kernels<S>().scan_forward(input_of<S>(in, sequence), out, begin, end, scratch);
    });
  });
}

Values SelectiveScan::backward_p1(Values dy, Context&, Saved& saved) {
  return backward_p1_into(std::move(dy[0]), {}, {}, saved);
}

Values SelectiveScan::backward_p1_into(at::Tensor dy, at::Tensor dbc, at::Tensor dz, Saved& saved) {
  const at::Tensor x = saved.take_p1(0);
  at::Tensor raw = saved.take_p1(1);
  const at::Tensor bc = saved.take_p1(2);
  at::Tensor z = saved.take_p1(3);
  const at::Tensor borders = saved.take_p1(4);
  dy = with_dense_rows(std::move(dy));
  TWOBP_CHECK(dy.sizes() == x.sizes(), "the gradient ", dy.sizes(), " does not fit the output of SelectiveScan ",
              a_log_.name(), ", ", x.sizes());
  const int64_t batch = x.size(0);
  const at::Tensor a_of_states = rates();
  const at::Tensor a = scaled(a_of_states);
  at::Tensor draw = exclusively_owned(raw) ? raw : at::empty(x.sizes(), x.options());
  if (!dz.defined()) dz = exclusively_owned(z) ? z : at::empty(x.sizes(), x.options());
  if (!dbc.defined()) dbc = at::empty(bc.sizes(), bc.options());
  at::Tensor dx = exclusively_owned(dy) ? dy : at::empty(x.sizes(), x.options());
  const ScanTensors in = {x, raw, z, bc, a, d_.value, bias_.value};
  const ScanGradientTensors out = {
      dx,
      draw,
      dz,
      dbc,
      at::empty({batch, state_, channels_}, a.options()),
      at::empty({batch, channels_}, a.options()),
      at::empty({batch, channels_}, a.options()),
      states_before(saved),
      saved.from_later.empty() ? at::Tensor() : saved.from_later[0],
      saved.previous() == nullptr ? at::Tensor() : at::empty({batch, state_, channels_}, a.options())};
  saved.to_later.clear();
  saved.from_later.clear();
  if (saved.previous() != nullptr) saved.previous()->from_later = {out.dinitial};
  if (by_operators(x)) {
    operators::scan_backward(in, dy, borders, out);
  } else {
    backward_groups(in, dy, borders, out);
  }
  add_parameter_gradients(a_of_states, out.da, out.dd, out.ddelta_bias);
  return {std::move(dx), std::move(draw), std::move(dbc), std::move(dz)};
}

void SelectiveScan::backward_groups(const ScanTensors& in, const at::Tensor& dy, const at::Tensor& borders,
                                    const ScanGradientTensors& to) const {
  const ScanSize size = {in.x.size(1), channels_, state_};
  const int64_t batch = in.x.size(0);
  const at::Tensor dbc_of_groups = at::empty({size.groups(), batch, size.sequence, 2 * state_}, in.a.options());
  dispatch_float(dtype_, "SelectiveScan", [&](auto zero) {
    using S = decltype(zero);
    using T = Compute<S>;
    for_groups<S>(batch, size, [&](int64_t sequence, int64_t begin, int64_t end, void* scratch) {
      const auto of_sequence = [&](const at::Tensor& t) {
        return t.defined() ? mutable_numbers<T>(t) + sequence * t.stride(0) : nullptr;
      };
      const ScanGradient<S> out = {rows_of<const S>(dy, sequence),
                                   borders.numel() > 0 ? numbers<T>(borders) + sequence * borders.stride(0) : nullptr,
                                   rows_of<S>(to.dx, sequence),
                                   rows_of<S>(to.ddelta, sequence),
                                   rows_of<S>(to.dz, sequence),
                                   mutable_numbers<T>(dbc_of_groups) + begin / kScanGroup * dbc_of_groups.stride(0) +
                                       sequence * dbc_of_groups.stride(1),
                                   mutable_numbers<T>(to.da) + sequence * to.da.stride(0),
                                   mutable_numbers<T>(to.dd) + sequence * channels_,
                                   mutable_numbers<T>(to.ddelta_bias) + sequence * channels_,
                                   of_sequence(to.initial),
                                   of_sequence(to.dfinal),
                                   of_sequence(to.dinitial)};
      scan_kernels<S>().scan_backward(input_of<S>(in, sequence), out, begin, end, scratch);
    });
  });
  to.dbc.copy_(sum_in_order(dbc_of_groups));
}

void SelectiveScan::add_parameter_gradients(const at::Tensor& rates, const at::Tensor& da, const at::Tensor& dd,
                                            const at::Tensor& dbias) {
  // A = -exp(A_log), so dA / dA_log = A.
  if (a_log_.trainable()) a_log_.grad_to_add().add_(sum_in_order(da).t() * rates);
  if (d_.trainable()) d_.grad_to_add().add_(sum_in_order(dd));
  if (bias_.trainable()) bias_.grad_to_add().add_(sum_in_order(dbias));
}

void SelectiveScan::collect_parameters(std::vector<Parameter*>& parameters) {
  parameters.push_back(&a_log_);
  parameters.push_back(&d_);
  parameters.push_back(&bias_);
}

}  // namespace twobp
