#include "twobp/nn/layers/latent_projections.h"

#include <utility>

#include "twobp/core/check.h"
#include "twobp/nn/kernels/products/rows.h"

namespace twobp {
namespace {

enum LatentChild : uint8_t { kOfQuery, kOfKeyValue };

}  // namespace

struct LatentProjections::Parts {
  at::Tensor q_nope, q_rope, k_nope, k_rope, v;
};

LatentProjections::LatentProjections(const LatentShape& shape, std::unique_ptr<Layer> query,
                                     std::unique_ptr<Layer> key_value)
    : shape_(shape), query_(std::move(query)), key_value_(std::move(key_value)) {
  TWOBP_CHECK(shape.rope_dim % 2 == 0, "latent attention turns pairs of features, so rope_dim must be even, got ",
              shape.rope_dim);
  TWOBP_CHECK((query_ != nullptr) == (shape.q_rank > 0) && key_value_ != nullptr,
              "latent attention needs a projection of compressed queries if there is a q_rank, and one of keys");
}

LatentProjections::Parts LatentProjections::parts_of(const at::Tensor& packed) const {
  const int64_t heads = shape_.heads, nope = shape_.nope_dim, dim = shape_.head_dim();
  const at::Tensor q = packed.narrow(2, 0, heads * dim).unflatten(2, {heads, dim});
  const at::Tensor k = packed.narrow(2, heads * dim, heads * dim).unflatten(2, {heads, dim});
  const int64_t values = heads * shape_.value_dim;
  return {q.narrow(3, 0, nope), q.narrow(3, nope, shape_.rope_dim), k.narrow(3, 0, nope),
          k.narrow(3, nope, shape_.rope_dim),
          packed.narrow(2, 2 * heads * dim, values).unflatten(2, {heads, shape_.value_dim})};
}

void LatentProjections::copy_turning(const at::Tensor& to, const at::Tensor& from, bool back) const {
  if (!shape_.interleaved) {
    to.copy_(from);
    return;
  }
  const int64_t half = shape_.rope_dim / 2;
  const at::Tensor& halves = back ? from : to;
  const at::Tensor& pairs = back ? to : from;
  const at::Tensor by_half = halves.unflatten(3, {2, half});
  const at::Tensor by_pair = pairs.unflatten(3, {half, 2}).transpose(3, 4);
  (back ? by_pair : by_half).copy_(back ? by_half : by_pair);
}

Values LatentProjections::forward(Values values, Context& context, Saved& saved) {
  const at::Tensor x = std::move(values[0]);
  values.clear();
  TWOBP_CHECK(x.dim() == 3 && x.size(2) == shape_.input(), "latent attention takes (batch, sequence, ", shape_.input(),
              "), got ", x.sizes());
  const int64_t heads = shape_.heads, nope = shape_.nope_dim;
  const std::vector<at::Tensor> compressed =
      x.split_with_sizes({shape_.query_width(), shape_.kv_rank, shape_.rope_dim}, 2);
  at::Tensor q = compressed[0];
  if (query_) q = query_->forward({q.contiguous()}, context, saved.child(kOfQuery))[0];
  const at::Tensor kv = key_value_->forward({compressed[1].contiguous()}, context, saved.child(kOfKeyValue))[0];
  at::Tensor packed = at::empty({x.size(0), x.size(1), shape_.packed()}, x.options());
  const Parts parts = parts_of(packed);
  const at::Tensor by_head = q.unflatten(2, {heads, shape_.head_dim()});
  parts.q_nope.copy_(by_head.narrow(3, 0, nope));
  copy_turning(parts.q_rope, by_head.narrow(3, nope, shape_.rope_dim), /*back=*/false);
  const at::Tensor key_values = kv.unflatten(2, {heads, nope + shape_.value_dim});
  parts.k_nope.copy_(key_values.narrow(3, 0, nope));
  copy_turning(parts.k_rope, compressed[2].unsqueeze(2).expand(parts.k_rope.sizes()), /*back=*/false);
  parts.v.copy_(key_values.narrow(3, nope, shape_.value_dim));
  return {std::move(packed)};
}

Values LatentProjections::backward_p1(Values values, Context& context, Saved& saved) {
  const at::Tensor dpacked = std::move(values[0]);
  values.clear();
  const int64_t batch = dpacked.size(0), positions = dpacked.size(1), heads = shape_.heads, nope = shape_.nope_dim;
  const Parts parts = parts_of(dpacked);
  at::Tensor dkv = at::empty({batch, positions, heads * (nope + shape_.value_dim)}, dpacked.options());
  const at::Tensor key_values = dkv.unflatten(2, {heads, nope + shape_.value_dim});
  key_values.narrow(3, 0, nope).copy_(parts.k_nope);
  key_values.narrow(3, nope, shape_.value_dim).copy_(parts.v);
  at::Tensor dx = at::empty({batch, positions, shape_.input()}, dpacked.options());
  const std::vector<at::Tensor> compressed =
      dx.split_with_sizes({shape_.query_width(), shape_.kv_rank, shape_.rope_dim}, 2);
  const auto wide = compute_type(dpacked.scalar_type());
  copy_turning(compressed[2].unsqueeze(2), parts.k_rope.sum(2, /*keepdim=*/true, wide), /*back=*/true);
  compressed[1].copy_(key_value_->backward_p1({std::move(dkv)}, context, saved.child(kOfKeyValue))[0]);
  saved.child(kOfKeyValue).release_p1();
  at::Tensor dq = query_ ? at::empty({batch, positions, heads * shape_.head_dim()}, dx.options()) : compressed[0];
  const at::Tensor by_head = dq.unflatten(2, {heads, shape_.head_dim()});
  by_head.narrow(3, 0, nope).copy_(parts.q_nope);
  copy_turning(by_head.narrow(3, nope, shape_.rope_dim), parts.q_rope, /*back=*/true);
  if (!query_) return {std::move(dx)};
  compressed[0].copy_(query_->backward_p1({std::move(dq)}, context, saved.child(kOfQuery))[0]);
  saved.child(kOfQuery).release_p1();
  return {std::move(dx)};
}

void LatentProjections::collect_p2(Saved& saved, std::vector<P2Unit>& units) {
  key_value_->collect_p2(saved.child(kOfKeyValue), units);
  if (query_) query_->collect_p2(saved.child(kOfQuery), units);
}

void LatentProjections::collect_parameters(std::vector<Parameter*>& parameters) {
  if (query_) query_->collect_parameters(parameters);
  key_value_->collect_parameters(parameters);
}

}  // namespace twobp
