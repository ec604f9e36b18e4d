#include "twobp/nn/layers/experts.h"

#include <utility>

#include "twobp/core/check.h"
#include "twobp/nn/kernels/products/groups.h"
#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/layers/attention_inputs.h"
#include "twobp/nn/layers/balance.h"
#include "twobp/nn/layers/expert_exchange.h"
#include "twobp/nn/layers/lora_linear.h"

namespace twobp {
namespace {

enum Child : uint8_t { kRouter, kInput, kOutput, kShared };
enum SwitchedChild : uint8_t { kGate, kBody };

int64_t experts_here(const ExpertsShape& shape) {
  return shape.experts / shape.share.of;
}

std::vector<ParameterPart> parts(const ExpertsNames& names, const ExpertsShape& shape,
                                 const std::vector<std::string>& projections, int64_t rows,
                                 const char* kind = ".weight") {
  const int64_t count = experts_here(shape);
  std::vector<ParameterPart> parts;
  for (int64_t expert = shape.share.index * count; expert < (shape.share.index + 1) * count; ++expert) {
    for (const std::string& name : projections) {
      parts.push_back({concat(names.experts, expert, ".", name, kind), rows});
    }
  }
  return parts;
}

// Gives rows of a group: those that lie together, or those of its tokens.
auto rows_of(const at::Tensor& matrix, bool of_tokens, const at::Tensor& places) {
  return [&matrix, of_tokens, &places](int64_t begin, int64_t rows) {
    return of_tokens ? matrix.index_select(0, places.narrow(0, begin, rows)) : matrix.narrow(0, begin, rows);
  };
}

// The limited gate: see ExpertsShape. Rows of `packed` are (gate | up).
constexpr double kLimitedSlope = 1.702;

at::Tensor limited_glu(const at::Tensor& packed, double limit) {
  const auto halves = packed.to(compute_type(packed.scalar_type())).chunk(2, -1);
  const at::Tensor gate = halves[0].clamp_max(limit);
  const at::Tensor up = halves[1].clamp(-limit, limit);
  return ((up + 1) * gate * at::sigmoid(gate * kLimitedSlope)).to(packed.scalar_type());
}

void limited_glu_backward(const at::Tensor& packed, const at::Tensor& dy, double limit, at::Tensor& dpacked) {
  const auto type = compute_type(packed.scalar_type());
  const auto halves = packed.to(type).chunk(2, -1);
  const at::Tensor gate = halves[0].clamp_max(limit);
  const at::Tensor up = halves[1].clamp(-limit, limit);
  const at::Tensor sigmoid = at::sigmoid(gate * kLimitedSlope);
  const at::Tensor slope = sigmoid * (1 + kLimitedSlope * gate * (1 - sigmoid));
  const at::Tensor dgate = (dy.to(type) * (up + 1) * slope).masked_fill_(halves[0] > limit, 0);
  const at::Tensor dup = (dy.to(type) * gate * sigmoid).masked_fill_(halves[1].abs() > limit, 0);
  dpacked.copy_(at::cat({dgate, dup}, -1));
}

at::Tensor activate(const at::Tensor& packed, const ExpertsShape& shape) {
  return shape.gate_limit > 0 ? limited_glu(packed, shape.gate_limit) : glu(packed, shape.gate);
}

at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  at::Tensor y = at::empty({a.size(0), b.size(1)}, a.options());
  write_product(y, a, b);
  return y;
}

// y[t] = the sum of the rows (tokens, chosen) of each token, in the order of the token's experts.
at::Tensor sum_of_tokens(const at::Tensor& matrix, const at::Tensor& rows) {
  at::Tensor sum = matrix.index_select(0, rows.select(1, 0));
  for (int64_t i = 1; i < rows.size(1); ++i) sum.add_(matrix.index_select(0, rows.select(1, i)));
  return sum;
}

// Where the rows of all tokens go. A token has as many rows as it has experts.
struct Routing {
  at::Tensor experts;  // (tokens, chosen)
  at::Tensor ends;     // (experts), on the host
  at::Tensor places;   // (tokens * chosen): the token of each row, in the order of the experts
  at::Tensor rows;     // (tokens, chosen): the row of each of a token's experts
};

// Which tokens of (B, S, dim) are padding; undefined if none are.
at::Tensor padding_of_tokens(const Context& context, at::IntArrayRef sizes, at::Device device) {
  if (sizes.size() != 3) return {};
  const at::Tensor padding = padding_of(context, sizes[0], context.past + sizes[1], device);
  return padding.defined() ? padding.narrow(1, context.past, sizes[1]).reshape({-1}) : padding;
}

Routing route(const at::Tensor& chosen, int64_t experts) {
  const at::Tensor of_rows = chosen.flatten();
  const at::Tensor order = at::argsort(of_rows, /*stable=*/true, 0, false);
  at::Tensor rows = at::empty_like(order);
  rows.scatter_(0, order, at::arange(order.numel(), order.options()));
  return {chosen, at::bincount(of_rows, {}, experts).cumsum(0).cpu(), order.floor_divide(chosen.size(1)),
          rows.view(chosen.sizes())};
}

}  // namespace

GroupedLinear::GroupedLinear(std::vector<ParameterPart> parts, int64_t groups, int64_t in, double init_std,
                             at::ScalarType dtype, Tokens tokens, ExpertShare share, bool bias)
    : weight_([&] {
        int64_t rows = 0;
        for (const ParameterPart& part : parts) rows += part.rows;
        return Parameter(parts, {rows, in}, dtype, init_std);
      }()),
      groups_(groups),
      sources_(share.of),
      tokens_(tokens) {
  weight_.hold_experts(groups, share);
  if (!bias) return;
  TWOBP_CHECK(share.of == 1, "experts with biases are not shared by replicas: set pipeline.experts to 1");
  const int64_t rows = weight_.sizes()[0];
  for (ParameterPart& part : parts) part.name = module_of(part.name) + ".bias";
  bias_.emplace(std::move(parts), std::vector<int64_t>{rows}, compute_type(dtype), 0);
}

Values GroupedLinear::forward(Values values, Context& context, Saved& saved) {
  at::Tensor& x = values[0];
  at::Tensor& ends = values[1];
  at::Tensor& places = values[2];
  const at::Tensor w = matrices();
  TWOBP_CHECK(x.dim() == 2 && x.size(1) == w.size(2), "the products of ", weight_.name(), " take rows of ", w.size(2),
              " numbers, got ", x.sizes());
  at::Tensor y = at::empty({places.size(0), w.size(1)}, x.options());
  multiply_groups(y, ends, w.transpose(1, 2), rows_of(x, tokens_ == Tokens::kInput, places), sources_);
  if (bias_) {
    const at::Tensor biases = bias_->value.view({groups_, -1});
    for_groups(ends, groups_, y.size(0), [&](int64_t group, int64_t begin, int64_t rows) {
      at::Tensor of_group = y.narrow(0, begin, rows);
      if (rows > 0) add_row(of_group, biases.select(0, group));
    });
  }
  if (!context.keeps()) return {std::move(y)};
  saved.keep_until_p1(ends);
  saved.keep_until_p1(places);
  if (weight_.trainable()) {
    saved.keep_until_p2(std::move(x));
    saved.keep_until_p2(std::move(ends));
    saved.keep_until_p2(std::move(places));
  }
  return {std::move(y)};
}

Values GroupedLinear::backward_p1(Values values, Context&, Saved& saved) {
  at::Tensor dy = std::move(values[0]);
  const at::Tensor ends = saved.take_p1(0);
  const at::Tensor places = saved.take_p1(1);
  const at::Tensor w = matrices();
  at::Tensor dx = at::empty({places.size(0), w.size(2)}, dy.options());
  multiply_groups(dx, ends, w, rows_of(dy, tokens_ == Tokens::kGradient, places), sources_);
  if (bias_ && bias_->trainable()) {
    const at::Tensor sums = bias_->grad_to_add().view({groups_, -1});
    for_groups(ends, groups_, dy.size(0), [&](int64_t group, int64_t begin, int64_t rows) {
      at::Tensor sum = sums.select(0, group);
      if (rows > 0) add_sum_of_rows(sum, dy.narrow(0, begin, rows));
    });
  }
  if (weight_.trainable()) saved.keep_until_p2(std::move(dy));
  return {std::move(dx)};
}

void GroupedLinear::backward_p2(std::span<Saved* const> saved) {
  for (const Saved* one : saved) {
    const at::Tensor& places = one->p2(2);
    const auto [gradient, adds] = weight_.grad_by_source_to_write();
    write_group_products(gradient.view({sources_ * groups_, -1, gradient.size(1)}), adds, one->p2(1), places.size(0),
                         rows_of(one->p2(3), tokens_ == Tokens::kGradient, places),
                         rows_of(one->p2(0), tokens_ == Tokens::kInput, places));
  }
}

void GroupedLinear::collect_p2(Saved& saved, std::vector<P2Unit>& units) {
  if (weight_.trainable()) units.push_back({this, &saved});
}

void GroupedLinear::collect_parameters(std::vector<Parameter*>& parameters) {
  parameters.push_back(&weight_);
  if (bias_) parameters.push_back(&*bias_);
}

Values Switched::forward(Values x, Context& context, Saved& saved) {
  at::Tensor factor = at::sigmoid(gate_->forward({x[0]}, context, saved.child(kGate))[0]);
  at::Tensor y = body_->forward(std::move(x), context, saved.child(kBody))[0];
  at::Tensor product = y * factor;
  if (context.keeps()) {
    saved.keep_until_p1(std::move(y));
    saved.keep_until_p1(std::move(factor));
  }
  return {std::move(product)};
}

Values Switched::backward_p1(Values dy, Context& context, Saved& saved) {
  const at::Tensor dfactor = (dy[0] * saved.take_p1(0)).sum(-1, /*keepdim=*/true);
  const at::Tensor factor = saved.take_p1(1);
  at::Tensor dx = body_->backward_p1({dy[0] * factor}, context, saved.child(kBody))[0];
  saved.child(kBody).release_p1();
  dx.add_(gate_->backward_p1({dfactor * factor * (1 - factor)}, context, saved.child(kGate))[0]);
  return {std::move(dx)};
}

void Switched::collect_p2(Saved& saved, std::vector<P2Unit>& units) {
  body_->collect_p2(saved.child(kBody), units);
  gate_->collect_p2(saved.child(kGate), units);
}

void Switched::collect_parameters(std::vector<Parameter*>& parameters) {
  body_->collect_parameters(parameters);
  gate_->collect_parameters(parameters);
}

Experts::Experts(const ExpertsNames& names, const ExpertsShape& shape, double init_std, at::ScalarType dtype,
                 std::unique_ptr<Layer> shared)
    : shape_(shape),
      router_name_(names.router),
      router_({{names.router + ".weight", shape.experts}}, shape.dim, init_std, dtype, shape.biased),
      input_(parts(names, shape, {names.gate, names.up}, shape.hidden), experts_here(shape), shape.dim, init_std, dtype,
             GroupedLinear::Tokens::kInput, shape.share, shape.biased),
      output_(parts(names, shape, {names.down}, shape.dim), experts_here(shape), shape.hidden, init_std, dtype,
              GroupedLinear::Tokens::kGradient, shape.share),
      shared_(std::move(shared)) {
  TWOBP_CHECK(shape.chosen >= 1 && shape.chosen <= shape.experts, names.router, " chooses ", shape.chosen, " of ",
              shape.experts, " experts");
  TWOBP_CHECK(shape.experts % shape.share.of == 0, "pipeline.experts is ", shape.share.of,
              ", which does not divide the ", shape.experts, " experts of ", names.router);
  if (shape.biased) {
    output_bias_.emplace(parts(names, shape, {names.down}, shape.dim, ".bias"),
                         std::vector<int64_t>{shape.experts * shape.dim}, compute_type(dtype), 0);
  }
}

at::Tensor Experts::of_experts(const at::Tensor& weights, const at::Tensor& chosen) const {
  return at::zeros({weights.size(0), shape_.experts}, weights.options()).scatter_(1, chosen, weights);
}

ExpertGroup& Experts::group(const Context& context) const {
  TWOBP_CHECK(context.experts != nullptr, "a layer has a part of its experts, but there is no group with the others");
  return *context.experts;
}

void Experts::check_scores(const at::Tensor& scores, at::ScalarType computed) const {
  if (!scores.is_cpu()) return;  // the host would wait for the device
  TWOBP_CHECK(at::isfinite(scores.sum()).item<bool>(), "the router ", router_name_,
              " gives scores that are not numbers (NaN): weights or activations before it have overflowed; lower "
              "optimizer.lr",
              shape_.balanced ? " or model.balance_loss" : "", ", or set train.clip_norm",
              computed == at::kBFloat16 || computed == at::kHalf ? ", or compute in fp32" : "");
}

Values Experts::forward(Values values, Context& context, Saved& saved) {
  const std::vector<int64_t> sizes = values[0].sizes().vec();
  at::Tensor x = as_matrix(values[0]);
  values.clear();
  const at::Tensor logits = router_.forward({x}, context, saved.child(kRouter))[0];
  // Small scores decide over experts, so they are computed in float32 at least.
  at::Tensor scores = at::softmax(logits, -1, compute_type(logits.scalar_type()));
  if (!context.training) check_scores(scores, logits.scalar_type());
  auto [weights, chosen] = at::topk(scores, shape_.chosen, -1);
  if (shape_.normalized) weights = weights / weights.sum(-1, /*keepdim=*/true);
  Routing routing = route(chosen, shape_.experts);
  if (context.experts != nullptr)
    context.experts->count(at::diff(routing.ends, 1, 0, at::zeros({1}, routing.ends.options())));
  at::Tensor of_rows = at::empty({routing.places.size(0), 1}, weights.options());
  of_rows.index_copy_(0, routing.rows.flatten(), weights.reshape({-1, 1}));
  const bool travels = shape_.share.of > 1;
  ExpertInputs here{x, std::move(routing.ends), std::move(routing.places), std::move(of_rows)};
  ExpertWay way;
  at::Tensor of_shared;
  const auto run_shared = [&] {
    if (shared_) of_shared = shared_->forward({std::move(x)}, context, saved.child(kShared))[0];
  };
  if (travels) here = to_experts(group(context), shape_.share, here, way, run_shared);
  at::Tensor packed = input_.forward({std::move(here.x), here.ends, here.places}, context, saved.child(kInput))[0];
  // The weight is a factor of the product's input, so that W of the product needs no rows of its own for dy.
  at::Tensor act = activate(packed, shape_);
  act.mul_(here.weights);
  at::Tensor y = output_.forward({std::move(act), here.ends, here.places}, context, saved.child(kOutput))[0];
  if (travels) y = from_experts(group(context), shape_.share, way, {std::move(y)})[0];
  at::Tensor sum = sum_of_tokens(y, routing.rows);
  if (output_bias_) sum.add_(product(of_experts(weights, chosen), output_biases()));
  if (!travels) run_shared();
  if (shared_) sum.add_(of_shared);
  Values out = {sum.view(sizes)};
  if (shape_.balanced) {
    out.push_back(balance_sums(scores, chosen, padding_of_tokens(context, sizes, scores.device())));
  }
  if (context.keeps()) {
    for (at::Tensor& one : Values{std::move(packed), std::move(here.weights), std::move(scores), std::move(weights),
                                  std::move(routing.experts), std::move(routing.rows)}) {
      saved.keep_until_p1(std::move(one));
    }
    if (travels) {
      saved.keep_until_p1(std::move(way.tokens));
      saved.keep_until_p1(std::move(way.counts));
    }
  }
  return out;
}

Values Experts::backward_p1(Values values, Context& context, Saved& saved) {
  const std::vector<int64_t> sizes = values[0].sizes().vec();
  at::Tensor packed = saved.take_p1(0);
  const at::Tensor of_rows = saved.take_p1(1);
  const at::Tensor scores = saved.take_p1(2);
  check_scores(scores, values[0].scalar_type());
  const at::Tensor weights = saved.take_p1(3);
  const at::Tensor chosen = saved.take_p1(4);
  const at::Tensor rows = saved.take_p1(5);
  const bool travels = shape_.share.of > 1;
  const ExpertWay way = travels ? ExpertWay{saved.take_p1(6), saved.take_p1(7)} : ExpertWay{};
  const at::Tensor dy = as_matrix(values[0]);
  const at::Tensor dsums = shape_.balanced ? values[1] : at::Tensor();
  values.clear();
  at::Tensor of_shared;
  const auto run_shared = [&] {
    if (!shared_) return;
    of_shared = shared_->backward_p1({dy}, context, saved.child(kShared))[0];
    saved.child(kShared).release_p1();
  };
  at::Tensor dy_here = dy;
  if (travels) dy_here = gradients_to_experts(group(context), shape_.share, way, dy, run_shared);
  at::Tensor dact = output_.backward_p1({std::move(dy_here)}, context, saved.child(kOutput))[0];
  saved.child(kOutput).release_p1();
  at::Tensor dweight_of_rows = at::mul(dact, activate(packed, shape_)).sum(-1, false, scores.scalar_type());
  dact.mul_(of_rows);
  at::Tensor dpacked = exclusively_owned(packed) ? packed : at::empty_like(packed);
  if (shape_.gate_limit > 0) {
    limited_glu_backward(packed, dact, shape_.gate_limit, dpacked);
  } else {
    glu_backward(packed, dact, shape_.gate, dpacked);
  }
  packed.reset();
  at::Tensor dx_of_rows = input_.backward_p1({std::move(dpacked)}, context, saved.child(kInput))[0];
  saved.child(kInput).release_p1();
  if (travels) {
    Values back = from_experts(group(context), shape_.share, way, {std::move(dx_of_rows), std::move(dweight_of_rows)});
    dx_of_rows = std::move(back[0]);
    dweight_of_rows = std::move(back[1]);
  }
  at::Tensor dx = sum_of_tokens(dx_of_rows, rows);
  // w = s / sum of the chosen s, of which dL/ds is (dL/dw - sum of w dL/dw) / sum; the softmax follows.
  at::Tensor dscores = dweight_of_rows.index_select(0, rows.flatten()).view(rows.sizes());
  if (output_bias_) {
    const at::Tensor wide = dy.to(scores.scalar_type());
    dscores.add_(product(wide, output_biases().t()).gather(-1, chosen));
    if (output_bias_->trainable()) {
      const at::Tensor gradient = product(of_experts(weights, chosen).t(), wide);
      output_bias_->accumulate(gradient.view({-1}));
    }
  }
  const at::Tensor of_chosen = scores.gather(-1, chosen);
  if (shape_.normalized) {
    dscores = (dscores - (dscores * weights).sum(-1, true)) / of_chosen.sum(-1, true);
  }
  const at::Tensor products = dscores * of_chosen;
  at::Tensor dlogits = scores * -products.sum(-1, true);
  dlogits.scatter_add_(-1, chosen, products);
  if (dsums.defined()) {
    at::Tensor of_scores = scores * dsums[1].to(scores.scalar_type());
    const at::Tensor padding = padding_of_tokens(context, sizes, scores.device());
    if (padding.defined()) of_scores.masked_fill_(padding.unsqueeze(1), 0);
    dlogits.add_(of_scores - scores * of_scores.sum(-1, true));
  }
  if (!travels) run_shared();
  if (shared_) dx.add_(of_shared);
  dx.add_(router_.backward_p1({dlogits.to(dx.scalar_type())}, context, saved.child(kRouter))[0]);
  return {dx.view(sizes)};
}

void Experts::collect_p2(Saved& saved, std::vector<P2Unit>& units) {
  output_.collect_p2(saved.child(kOutput), units);
  input_.collect_p2(saved.child(kInput), units);
  if (shared_) shared_->collect_p2(saved.child(kShared), units);
  router_.collect_p2(saved.child(kRouter), units);
}

void Experts::collect_parameters(std::vector<Parameter*>& parameters) {
  router_.collect_parameters(parameters);
  input_.collect_parameters(parameters);
  output_.collect_parameters(parameters);
  if (output_bias_) parameters.push_back(&*output_bias_);
  if (shared_) shared_->collect_parameters(parameters);
}

}  // namespace twobp
