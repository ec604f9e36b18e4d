#include "twobp/nn/layers/embedding.h"

#include "twobp/nn/kernels/operators.h"
#include "twobp/nn/kernels/products/rows.h"

namespace twobp {
namespace {

void check_ids(const at::Tensor& ids, int64_t vocab) {
  const at::Tensor in_order = ids.contiguous();
  const int64_t* id = in_order.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < ids.numel(); ++i) {
    TWOBP_CHECK(id[i] >= 0 && id[i] < vocab, "token id ", id[i], " at position ", i,
                " of the micro-batch is outside the vocabulary of ", vocab);
  }
}

}  // namespace

Embedding::Embedding(std::string name, int64_t vocab, int64_t dim, double init_std, at::ScalarType dtype,
                     int64_t padding, double scale)
    : weight_({{std::move(name), vocab}}, {vocab, dim}, dtype, init_std), padding_(padding), scale_(scale) {
  weight_.used_as(/*factor=*/false, /*table=*/true);
}

Values Embedding::forward(Values, Context& context, Saved& saved) {
  const at::Tensor& ids = context.field("input_ids");
  TWOBP_CHECK(ids.scalar_type() == at::kLong && ids.dim() == 2, "input_ids must be int64 (batch, sequence), got ",
              c10::toString(ids.scalar_type()), " ", ids.sizes());
  if (ids.is_cpu()) check_ids(ids, weight_.value.size(0));
  const at::Tensor at = on_device(ids, weight_.value.device());
  if (context.keeps() && weight_.trainable()) saved.keep_until_p2(at);
  at::Tensor rows = at::embedding(weight_.value, at);
  if (scale_ != 1) rows.mul_(scale_);
  return {std::move(rows)};
}

Values Embedding::backward_p1(Values dy, Context&, Saved& saved) {
  if (!weight_.trainable()) return {};
  TWOBP_CHECK(saved.p2_count() == 1, "backward-p1 of Embedding ", weight_.name(),
              " does not find exactly one saved tensor, the ids: it runs once after each forward");
  const at::Tensor& ids = saved.p2(0);
  TWOBP_CHECK(dy[0].numel() == ids.numel() * weight_.value.size(1), "the gradient ", dy[0].sizes(), " of Embedding ",
              weight_.name(), " does not fit its output for ids ", ids.sizes());
  saved.keep_until_p2(std::move(dy[0]));
  return {};
}

void Embedding::backward_p2(std::span<Saved* const> saved) {
  at::Tensor& grad = weight_.grad_to_add();
  const int64_t dim = grad.size(1);
  for (const Saved* one : saved) {
    const at::Tensor ids = one->p2(0).contiguous();
    const at::Tensor dy = one->p2(1).contiguous();
    if (by_operators(grad)) {
      at::Tensor rows = dy.view({-1, dim});
      if (padding_ >= 0) rows = rows.masked_fill(ids.view({-1, 1}).eq(padding_), 0);
      operators::add_rows_at(grad, ids.view({-1}), scale_ == 1 ? rows : rows * scale_);
      continue;
    }
    const int64_t* id = ids.const_data_ptr<int64_t>();
    dispatch_float(dy.scalar_type(), "Embedding", [&](auto zero) {
      using S = decltype(zero);
      auto* rows = mutable_numbers<Compute<S>>(grad);
      const auto scale = static_cast<Compute<S>>(scale_);
      const S* from = numbers<S>(dy);
      for (int64_t i = 0; i < ids.numel(); ++i, from += dim) {
        if (id[i] == padding_) continue;
        auto* row = rows + id[i] * dim;
        for (int64_t c = 0; c < dim; ++c) row[c] += scale * load(from[c]);
      }
    });
  }
}

void Embedding::collect_p2(Saved& saved, std::vector<P2Unit>& units) {
  if (weight_.trainable()) units.push_back({this, &saved});
}
void Embedding::collect_parameters(std::vector<Parameter*>& parameters) {
  parameters.push_back(&weight_);
}

}  // namespace twobp
