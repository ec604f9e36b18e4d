#include "twobp/nn/layers/experts.h"

#include <cmath>
#include <limits>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/nn/kernels/products/groups.h"
#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/layers/attention_inputs.h"
#include "twobp/nn/layers/balance.h"
#include "twobp/nn/layers/expert_exchange.h"
#include "twobp/nn/thrown.h"

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
  TWOBP_CHECK(shape.experts % shape.share.of == 0, "pipeline.experts is ", shape.share.of,
              ", which does not divide the ", shape.experts, " experts of ", names.router);
  const int64_t count = experts_here(shape);
  std::vector<ParameterPart> parts;
  for (int64_t expert = shape.share.index * count; expert < (shape.share.index + 1) * count; ++expert) {
    for (const std::string& name : projections) {
      parts.push_back({concat(names.experts, expert, ".", name, kind), rows});
    }
  }
  return parts;
}

// LibTorch's optimizers compute vectors of up to 16 numbers, and round those at the end of a tensor otherwise. So that
// no number is there for some sizes of groups only, replicas share whole vectors.
void check_share(const Parameter& parameter, const ExpertShare& share) {
  constexpr int64_t kVector = 16;
  TWOBP_CHECK(share.of == 1 || parameter.numel() % kVector == 0, "pipeline.experts is ", share.of, ", but the ",
              parameter.numel(), " numbers of ", parameter.name(), " and of the other experts here are no multiple of ",
              kVector, ", so that their updates would be rounded otherwise than with 1: change the width or the rank");
}

// Gives rows of a group: those that lie together, or those of its tokens.
auto rows_of(const at::Tensor& matrix, bool of_tokens, const at::Tensor& places) {
  return [&matrix, of_tokens, &places](int64_t begin, int64_t rows) {
    return of_tokens ? matrix.index_select(0, places.narrow(0, begin, rows)) : matrix.narrow(0, begin, rows);
  };
}

// The limited gate (ExpertsShape) is SwiGLU of these rows. `packed` has rows (gate | up). Kernels compute each row by
// itself; ATen's sigmoid has other bits at the end of a tensor, which depends on who holds the experts.
constexpr double kLimitedSlope = 1.702;

at::Tensor limited(const at::Tensor& packed, double limit) {
  const auto halves = packed.to(compute_type(packed.scalar_type())).chunk(2, -1);
  return at::cat(
      {halves[0].clamp_max(limit).mul_(kLimitedSlope), halves[1].clamp(-limit, limit).add_(1).mul_(1 / kLimitedSlope)},
      -1);
}

at::Tensor limited_glu(const at::Tensor& packed, double limit) {
  return glu(limited(packed, limit), Gate::kSilu).to(packed.scalar_type());
}

void limited_glu_backward(const at::Tensor& packed, const at::Tensor& dy, double limit, at::Tensor& dpacked) {
  at::Tensor rows = limited(packed, limit);
  glu_backward(rows, dy.to(rows.scalar_type()).contiguous(), Gate::kSilu, rows);
  const auto halves = packed.chunk(2, -1), gradients = rows.chunk(2, -1);
  gradients[0].mul_(kLimitedSlope).masked_fill_(halves[0] > limit, 0);
  gradients[1].mul_(1 / kLimitedSlope).masked_fill_(halves[1].abs() > limit, 0);
  dpacked.copy_(rows);
}

at::Tensor activate(const at::Tensor& packed, const ExpertsShape& shape) {
  return shape.gate_limit > 0 ? limited_glu(packed, shape.gate_limit) : glu(packed, shape.gate);
}

// In the memory of `packed`, if nothing else holds it.
at::Tensor activate_backward(at::Tensor packed, const at::Tensor& dy, const ExpertsShape& shape) {
  at::Tensor dpacked = exclusively_owned(packed) ? packed : at::empty_like(packed);
  if (shape.gate_limit > 0) {
    limited_glu_backward(packed, dy, shape.gate_limit, dpacked);
  } else {
    glu_backward(packed, dy, shape.gate, dpacked);
  }
  return dpacked;
}

// Runs products of `rows`, which may be many where most tokens choose the experts of one replica. An error of LibTorch,
// such as too little memory, then names the layer. `own`: the rows of this replica's tokens; 0: unknown.
template <typename Products>
auto with_rows(const char* what, const std::string& name, int64_t rows, int64_t own, const Products& products) {
  try {
    return products();
  } catch (const c10::Error&) {
    fail(what, name, ", with ", rows, " rows of tokens", own > 0 ? concat(" where ", own, " would be even") : "", ": ",
         message_of_thrown());
  }
}

at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  at::Tensor y = at::empty({a.size(0), b.size(1)}, a.options());
  write_product(y, a, b);
  return y;
}

// DeepSeek adds it to the sum by which weights are divided. The scores of a softmax are too large to notice it.
constexpr double kLeastSum = 1e-20;

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

// Of the sums of balance.h, to dL/dlogits of a softmax.
void add_gradient_of_sums(at::Tensor& dlogits, const at::Tensor& scores, const at::Tensor& dsums,
                          const at::Tensor& padding) {
  at::Tensor of_scores = scores * dsums[1].to(scores.scalar_type());
  if (padding.defined()) of_scores.masked_fill_(padding.unsqueeze(1), 0);
  dlogits.add_(of_scores - scores * of_scores.sum(-1, true));
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
      share_(share),
      tokens_(tokens) {
  weight_.hold_experts(groups, share);
  check_share(weight_, share);
  if (!bias) return;
  const int64_t rows = weight_.sizes()[0];
  for (ParameterPart& part : parts) part.name = module_of(part.name) + ".bias";
  bias_.emplace(std::move(parts), std::vector<int64_t>{rows}, compute_type(dtype), 0);
  bias_->hold_experts(groups, share);
  check_share(*bias_, share);
}

void GroupedLinear::adapt(const std::string& name, const LoraOptions& lora, at::ScalarType dtype) {
  weight_.freeze();
  if (bias_) bias_->freeze();
  const int64_t in = weight_.sizes()[1], out = weight_.sizes()[0] / groups_;
  const auto make = [&](const char* kind, int64_t rows, int64_t cols, double std) {
    std::vector<ParameterPart> parts;
    for (int64_t group = 0; group < groups_; ++group)
      parts.push_back({concat(name, ".", share_.index * groups_ + group, kind), rows});
    Parameter parameter(std::move(parts), {groups_ * rows, cols}, dtype, std);
    parameter.hold_experts(groups_, share_);
    check_share(parameter, share_);
    return parameter;
  };
  const double std = 1 / std::sqrt(3.0 * static_cast<double>(in));  // as of LoraLinear
  adapter_.emplace(
      Adapter{make(".lora_A.weight", lora.rank, in, std), make(".lora_B.weight", out, lora.rank, 0), lora.scale()});
}

void GroupedLinear::write_gradient(Parameter& parameter, const at::Tensor& ends, const at::Tensor& places,
                                   const at::Tensor& dy, bool dy_of_tokens, const at::Tensor& x,
                                   bool x_of_tokens) const {
  with_rows("W of ", parameter.name(), places.size(0), 0, [&] {
    const auto [gradient, adds] = parameter.grad_by_source_to_write();
    write_group_products(gradient.view({share_.of * groups_, -1, gradient.size(1)}), adds, ends, places.size(0),
                         rows_of(dy, dy_of_tokens, places), rows_of(x, x_of_tokens, places));
  });
}

Values GroupedLinear::forward(Values values, Context& context, Saved& saved) {
  at::Tensor& x = values[0];
  at::Tensor& ends = values[1];
  at::Tensor& places = values[2];
  const at::Tensor w = by_group(weight_);
  TWOBP_CHECK(x.dim() == 2 && x.size(1) == w.size(2), "the products of ", weight_.name(), " take rows of ", w.size(2),
              " numbers, got ", x.sizes());
  at::Tensor y = at::empty({places.size(0), w.size(1)}, x.options());
  const auto x_rows = rows_of(x, tokens_ == Tokens::kInput, places);
  multiply_groups(y, ends, w.transpose(1, 2), x_rows, share_.of);
  at::Tensor u;
  if (adapter_) {
    u = at::empty({places.size(0), adapter_->a.value.size(0) / groups_}, x.options());
    multiply_groups(u, ends, by_group(adapter_->a).transpose(1, 2), x_rows, share_.of);
    u.mul_(adapter_->scale);
    multiply_groups(y, ends, by_group(adapter_->b).transpose(1, 2), rows_of(u, false, places), share_.of,
                    /*adds=*/true);
  }
  if (bias_) {
    const at::Tensor biases = bias_->value.view({groups_, -1});
    for_groups(ends, share_.of * groups_, y.size(0), [&](int64_t group, int64_t begin, int64_t rows) {
      at::Tensor of_group = y.narrow(0, begin, rows);
      if (rows > 0) add_row(of_group, biases.select(0, group % groups_));
    });
  }
  if (!context.keeps()) return {std::move(y)};
  saved.keep_until_p1(ends);
  saved.keep_until_p1(places);
  if (trains()) {
    saved.keep_until_p2(std::move(x));
    saved.keep_until_p2(std::move(ends));
    saved.keep_until_p2(std::move(places));
    if (adapter_) saved.keep_until_p2(std::move(u));
  }
  return {std::move(y)};
}

Values GroupedLinear::backward_p1(Values values, Context&, Saved& saved) {
  at::Tensor dy = std::move(values[0]);
  const at::Tensor ends = saved.take_p1(0);
  const at::Tensor places = saved.take_p1(1);
  const at::Tensor w = by_group(weight_);
  at::Tensor dx = at::empty({places.size(0), w.size(2)}, dy.options());
  const auto dy_rows = rows_of(dy, tokens_ == Tokens::kGradient, places);
  multiply_groups(dx, ends, w, dy_rows, share_.of);
  at::Tensor v;
  if (adapter_) {
    v = at::empty({places.size(0), adapter_->b.value.size(1)}, dy.options());
    multiply_groups(v, ends, by_group(adapter_->b), dy_rows, share_.of);
    v.mul_(adapter_->scale);
    multiply_groups(dx, ends, by_group(adapter_->a), rows_of(v, false, places), share_.of, /*adds=*/true);
  }
  if (bias_ && bias_->trainable()) {
    const at::Tensor of_one = bias_->grad_to_add();
    const at::Tensor sums = (share_.of > 1 ? bias_->grad_by_source : of_one).view({share_.of * groups_, -1});
    for_groups(ends, share_.of * groups_, dy.size(0), [&](int64_t group, int64_t begin, int64_t rows) {
      at::Tensor sum = sums.select(0, group);
      if (rows > 0) add_sum_of_rows(sum, dy.narrow(0, begin, rows));
    });
  }
  if (trains()) saved.keep_until_p2(std::move(dy));
  if (adapter_ && trains()) saved.keep_until_p2(std::move(v));
  return {std::move(dx)};
}

void GroupedLinear::backward_p2(std::span<Saved* const> saved) {
  for (const Saved* one : saved) {
    const at::Tensor &x = one->p2(0), &ends = one->p2(1), &places = one->p2(2);
    const bool x_of_tokens = tokens_ == Tokens::kInput, dy_of_tokens = !x_of_tokens;
    if (!adapter_) {
      write_gradient(weight_, ends, places, one->p2(3), dy_of_tokens, x, x_of_tokens);
      continue;
    }
    const at::Tensor &u = one->p2(3), &dy = one->p2(4), &v = one->p2(5);  // u and v are scaled
    if (adapter_->a.trainable()) write_gradient(adapter_->a, ends, places, v, false, x, x_of_tokens);
    if (adapter_->b.trainable()) write_gradient(adapter_->b, ends, places, dy, dy_of_tokens, u, false);
  }
}

void GroupedLinear::collect_p2(Saved& saved, std::vector<P2Unit>& units) {
  if (trains()) units.push_back({this, &saved});
}

void GroupedLinear::collect_parameters(std::vector<Parameter*>& parameters) {
  parameters.push_back(&weight_);
  if (bias_) parameters.push_back(&*bias_);
  if (adapter_) parameters.insert(parameters.end(), {&adapter_->a, &adapter_->b});
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
                 std::unique_ptr<Layer> shared, const LoraOptions& lora)
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
  if (LoraLinear::adapts({{names.input_module}}, lora)) input_.adapt(names.input_module, lora, dtype);
  if (LoraLinear::adapts({{names.output_module}}, lora)) output_.adapt(names.output_module, lora, dtype);
  TWOBP_CHECK(shape.groups >= 1 && shape.experts % shape.groups == 0 && shape.chosen_groups >= 1 &&
                  shape.chosen_groups <= shape.groups &&
                  shape.chosen <= shape.chosen_groups * (shape.experts / shape.groups),
              names.router, " chooses ", shape.chosen, " of ", shape.experts, " experts from ", shape.chosen_groups,
              " of ", shape.groups, " groups");
  TWOBP_CHECK(!shape.sigmoid || !shape.balanced, "the loss that balances experts is of a softmax");
  if (!names.correction.empty()) {
    correction_.emplace(std::vector<ParameterPart>{{names.correction, shape.experts}},
                        std::vector<int64_t>{shape.experts}, compute_type(dtype), 0);
    correction_->freeze();
    if (shape.balance_rate > 0) tokens_.emplace(Parameter::expert_tokens(*correction_, shape.balance_rate));
  }
  if (shape.biased) {
    ExpertsShape all = shape;  // each replica adds them to the sums of its own tokens
    all.share = {};
    output_bias_.emplace(parts(names, all, {names.down}, shape.dim, ".bias"),
                         std::vector<int64_t>{shape.experts * shape.dim}, compute_type(dtype), 0);
  }
}

at::Tensor Experts::choose(const at::Tensor& scores) const {
  at::Tensor ranks = correction_ ? scores + correction_->value : scores;
  if (shape_.groups > 1) {
    const at::Tensor by_group = ranks.unflatten(-1, {shape_.groups, -1});
    const at::Tensor of_groups = shape_.sigmoid ? std::get<0>(at::topk(by_group, 2, -1)).sum(-1) : by_group.amax(-1);
    const at::Tensor best = std::get<1>(at::topk(of_groups, shape_.chosen_groups, -1));
    const at::Tensor others = at::ones_like(of_groups, at::kBool).scatter_(-1, best, false);
    ranks = by_group.masked_fill(others.unsqueeze(-1), -std::numeric_limits<double>::infinity()).flatten(-2);
  }
  return std::get<1>(at::topk(ranks, shape_.chosen, -1));
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
  const auto wide = compute_type(logits.scalar_type());
  at::Tensor scores = shape_.sigmoid ? at::sigmoid(logits.to(wide)) : at::softmax(logits, -1, wide);
  if (!context.training) check_scores(scores, logits.scalar_type());
  const at::Tensor chosen = choose(scores);
  at::Tensor weights = scores.gather(-1, chosen);
  if (shape_.normalized) weights = weights / (weights.sum(-1, /*keepdim=*/true) + kLeastSum);
  if (shape_.scale != 1) weights.mul_(shape_.scale);
  Routing routing = route(chosen, shape_.experts);
  const at::Tensor tokens = at::diff(routing.ends, 1, 0, at::zeros({1}, routing.ends.options()));
  const bool counts = context.experts != nullptr && context.experts->count(tokens);
  if (counts && context.training && correction_ && correction_->is_corrected())
    tokens_->value.add_(tokens.to(tokens_->value.device()));
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
  at::Tensor packed;
  at::Tensor y = with_rows("the experts of ", router_name_, here.places.size(0), routing.rows.numel(), [&] {
    packed = input_.forward({std::move(here.x), here.ends, here.places}, context, saved.child(kInput))[0];
    // The weight is a factor of the product's input, so that W of the product needs no rows of its own for dy.
    at::Tensor act = activate(packed, shape_);
    act.mul_(here.weights);
    return output_.forward({std::move(act), here.ends, here.places}, context, saved.child(kOutput))[0];
  });
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

at::Tensor Experts::gradient_of_logits(at::Tensor dweights, const at::Tensor& weights, const at::Tensor& scores,
                                       const at::Tensor& chosen) const {
  const at::Tensor of_chosen = scores.gather(-1, chosen);
  // w = scale s / sum of the chosen s, of which dL/ds is (scale dL/dw - sum of w dL/dw) / sum.
  const at::Tensor mean = shape_.normalized ? (dweights * weights).sum(-1, true) : at::Tensor();
  if (shape_.scale != 1) dweights.mul_(shape_.scale);
  if (shape_.normalized) dweights = (dweights - mean) / (of_chosen.sum(-1, true) + kLeastSum);
  const at::Tensor products = dweights * of_chosen;
  if (shape_.sigmoid) return at::zeros_like(scores).scatter_(-1, chosen, products * (1 - of_chosen));
  at::Tensor dlogits = scores * -products.sum(-1, true);
  dlogits.scatter_add_(-1, chosen, products);
  return dlogits;
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
  at::Tensor dweight_of_rows;
  at::Tensor dx_of_rows = with_rows("the experts of ", router_name_, packed.size(0), rows.numel(), [&] {
    at::Tensor dact = output_.backward_p1({std::move(dy_here)}, context, saved.child(kOutput))[0];
    saved.child(kOutput).release_p1();
    dweight_of_rows = at::mul(dact, activate(packed, shape_)).sum(-1, false, scores.scalar_type());
    dact.mul_(of_rows);
    at::Tensor dpacked = activate_backward(std::move(packed), dact, shape_);
    return input_.backward_p1({std::move(dpacked)}, context, saved.child(kInput))[0];
  });
  saved.child(kInput).release_p1();
  if (travels) {
    Values back = from_experts(group(context), shape_.share, way, {std::move(dx_of_rows), std::move(dweight_of_rows)});
    dx_of_rows = std::move(back[0]);
    dweight_of_rows = std::move(back[1]);
  }
  at::Tensor dx = sum_of_tokens(dx_of_rows, rows);
  at::Tensor dweights = dweight_of_rows.index_select(0, rows.flatten()).view(rows.sizes());
  if (output_bias_) {
    const at::Tensor wide = dy.to(scores.scalar_type());
    dweights.add_(product(wide, output_biases().t()).gather(-1, chosen));
    if (output_bias_->trainable()) {
      const at::Tensor gradient = product(of_experts(weights, chosen).t(), wide);
      output_bias_->accumulate(gradient.view({-1}));
    }
  }
  at::Tensor dlogits = gradient_of_logits(std::move(dweights), weights, scores, chosen);
  if (dsums.defined()) add_gradient_of_sums(dlogits, scores, dsums, padding_of_tokens(context, sizes, scores.device()));
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
  if (correction_) parameters.push_back(&*correction_);
  if (tokens_) parameters.push_back(&*tokens_);
  input_.collect_parameters(parameters);
  output_.collect_parameters(parameters);
  if (output_bias_) parameters.push_back(&*output_bias_);
  if (shared_) shared_->collect_parameters(parameters);
}

}  // namespace twobp
