#include "twobp/nn/layers/balance.h"

#include "twobp/core/check.h"
#include "twobp/nn/kernels/products/rows.h"
#include "twobp/nn/layers/losses.h"

namespace twobp {
namespace {

// The labels that count, of all slices.
double targets_of(const Context& context) {
  const Fields& fields = context.sliced() ? *context.slice.sequences : *context.fields;
  return static_cast<double>(fields.at("labels").ne(kIgnoreLabel).sum().item<int64_t>());
}

bool is_last(const Context& context) {
  return !context.sliced() || context.past + context.slice.length == context.slice.positions;
}

}  // namespace

at::Tensor balance_sums(const at::Tensor& scores, const at::Tensor& chosen, const at::Tensor& padding) {
  const int64_t experts = scores.size(1);
  at::Tensor counted = scores;
  at::Tensor choices = chosen.flatten();
  if (padding.defined()) {
    counted = scores.masked_fill(padding.unsqueeze(1), 0);
    choices = choices.masked_select(padding.logical_not().unsqueeze(1).expand_as(chosen).reshape({-1}));
  }
  at::Tensor sums = at::zeros({experts}, scores.options());
  add_sum_of_rows(sums, counted);
  return at::stack({at::bincount(choices, {}, experts).to(at::kDouble), sums.to(at::kDouble)});
}

Values BalanceBegin::forward(Values y, Context&, Saved&) {
  y.push_back(at::zeros({2, experts_}, y[0].options().dtype(at::kDouble)));
  return y;
}

Values BalanceBegin::backward_p1(Values dy, Context&, Saved&) {
  return {std::move(dy[0])};
}

Values BalanceBeside::forward(Values x, Context& context, Saved& saved) {
  TWOBP_CHECK(x.size() == 2, "a layer of a model with a balanced mixture takes two tensors, got ", x.size());
  at::Tensor sums = std::move(x[1]);
  x.pop_back();
  Values y = branch().forward(std::move(x), context, saved);
  if (y.size() > 1) sums = sums + y[1];
  return {std::move(y[0]), std::move(sums)};
}

Values BalanceBeside::backward_p1(Values dy, Context& context, Saved& saved) {
  at::Tensor dsums = dy[1];
  Values dx = branch().backward_p1(std::move(dy), context, saved);
  return {std::move(dx[0]), std::move(dsums)};
}

Values BalanceLoss::forward(Values x, Context& context, Saved& saved) {
  at::Tensor sums = std::move(x[1]);
  x.pop_back();
  Values y = branch_->forward(std::move(x), context, saved.child(0));
  if (context.wants_logits) return y;
  if (saved.previous()) sums = sums + saved.previous()->to_later[0];
  if (!is_last(context)) {
    saved.to_later = {std::move(sums)};
    return y;
  }
  // Every token counts `chosen` times, in every layer.
  const at::Tensor tokens = sums[0].sum() / static_cast<double>(chosen_);
  const double factor = factor_ * static_cast<double>(sums.size(1)) * targets_of(context);
  const at::Tensor of_sums = at::nan_to_num(sums[0] / tokens.square(), 0) * factor;  // no token: all are padding
  y[0].add_(at::dot(of_sums, sums[1]) * context.loss_weight);
  if (context.keeps()) {
    const LossFactor of_gradient = context.loss_weight * context.loss_scale;
    saved.keep_until_p1(at::stack({at::zeros_like(of_sums), of_sums * of_gradient}));
  }
  return y;
}

Values BalanceLoss::backward_p1(Values dy, Context& context, Saved& saved) {
  at::Tensor dsums = is_last(context) ? saved.take_p1(0) : saved.from_later[0];
  if (saved.previous()) saved.previous()->from_later = {dsums};
  saved.to_later.clear();
  saved.from_later.clear();
  Values dx = branch_->backward_p1(std::move(dy), context, saved.child(0));
  saved.child(0).release_p1();
  return {std::move(dx[0]), std::move(dsums)};
}

void BalanceLoss::collect_p2(Saved& saved, std::vector<P2Unit>& units) {
  branch_->collect_p2(saved.child(0), units);
}

}  // namespace twobp
