#include "twobp/nn/layers/residual_block.h"

#include "twobp/core/check.h"

namespace twobp {
namespace {

// The block's convolutions in order.
std::vector<ConvolutionOptions> convolutions(const ResidualBlockOptions& o) {
  if (!o.bottleneck) return {{o.in, o.out, 3, o.stride, 1}, {o.out, o.out, 3, 1, 1}};
  const int64_t narrow = o.out / 4;
  return {{o.in, narrow, 1, 1, 0}, {narrow, narrow, 3, o.stride, 1}, {narrow, o.out, 1, 1, 0}};
}

std::string convolution_name(const std::string& block, size_t i) {
  return block + ".layer." + std::to_string(i) + ".convolution.weight";
}

std::string norm_name(const std::string& block, size_t i) {
  return block + ".layer." + std::to_string(i) + ".normalization";
}

}  // namespace

ResidualBlock::ResidualBlock(const std::string& name, const ResidualBlockOptions& o, at::ScalarType dtype)
    : first_(convolution_name(name, 0), convolutions(o).front(), dtype),
      last_(norm_name(name, convolutions(o).size() - 1), o.out, dtype) {
  TWOBP_CHECK(!o.bottleneck || (o.out >= 4 && o.out % 4 == 0), "the bottleneck ", name, " has ", o.out,
              " channels, which is not a multiple of 4");
  const std::vector<ConvolutionOptions> all = convolutions(o);
  for (size_t i = 1; i < all.size(); ++i) {
    inner_.push_back(
        std::make_unique<BatchNormReluConv2d>(norm_name(name, i - 1), convolution_name(name, i), all[i], dtype));
  }
  if (o.projects()) {
    const std::string shortcut = name + ".shortcut.";
    projection_ = std::make_unique<Projection>(
        Projection{Conv2d(shortcut + "convolution.weight", {o.in, o.out, 1, o.stride, 0}, dtype),
                   BatchNormRows(shortcut + "normalization", o.out, dtype)});
  }
}

Values ResidualBlock::forward(Values values, Context& context, Saved& saved) {
  at::Tensor other = as_contiguous(std::move(values[0]));
  Values branch = first_.forward({other}, context, saved.child(0));
  for (size_t i = 0; i < inner_.size(); ++i) {
    branch = inner_[i]->forward(std::move(branch), context, saved.child(i + 1));
  }
  at::Tensor z = std::move(branch[0]);
  at::Tensor scales = last_.scales(z, context);
  at::Tensor other_scales;
  if (projection_) {
    other = projection_->convolution.forward({other}, context, saved.child(projection_child()))[0];
    other_scales = projection_->norm.scales(other, context);
  }
  at::Tensor y = context.keeps() ? at::empty_like(z) : z;
  last_.apply_add_relu(z, scales, other, other_scales, y);
  if (context.keeps()) {
    saved.keep_until_p1(std::move(z));
    saved.keep_until_p1(std::move(scales));
    saved.keep_until_p1(std::move(other));
    if (projection_) saved.keep_until_p1(std::move(other_scales));
  }
  return {std::move(y)};
}

Values ResidualBlock::backward_p1(Values values, Context& context, Saved& saved) {
  at::Tensor z = saved.take_p1(0);
  const at::Tensor scales = saved.take_p1(1);
  at::Tensor other = saved.take_p1(2);
  const at::Tensor other_scales = projection_ ? saved.take_p1(3) : at::Tensor();
  at::Tensor dy = as_contiguous(std::move(values[0]));
  values.clear();
  // dL/d(sum) overwrites dy, and dL/dz overwrites z.
  at::Tensor g = exclusively_owned(dy) ? std::move(dy) : at::empty_like(dy);
  const at::Tensor sums = last_.backward_sums_add_relu(dy.defined() ? dy : g, z, scales, other, other_scales, g);
  last_.backward(g, z, scales, sums, /*relu=*/false, z);
  if (projection_) {
    const at::Tensor other_sums = projection_->norm.backward_sums(g, other, other_scales, /*relu=*/false);
    projection_->norm.backward(g, other, other_scales, other_sums, /*relu=*/false, g);
  }
  other.reset();
  Values dx = {std::move(z)};
  for (size_t i = inner_.size(); i-- > 0;) {
    dx = inner_[i]->backward_p1(std::move(dx), context, saved.child(i + 1));
    saved.child(i + 1).release_p1();
  }
  at::Tensor last = std::move(dx[0]);
  dx.clear();
  dx = first_.backward_p1(std::move(last), saved.child(0), projection_ ? at::Tensor() : g);
  saved.child(0).release_p1();
  if (projection_) {
    Saved& child = saved.child(projection_child());
    dx = projection_->convolution.backward_p1(std::move(g), child, std::move(dx[0]));
    child.release_p1();
  }
  return dx;
}

void ResidualBlock::collect_p2(Saved& saved, std::vector<P2Unit>& units) {
  for (size_t i = inner_.size(); i-- > 0;) inner_[i]->collect_p2(saved.child(i + 1), units);
  first_.collect_p2(saved.child(0), units);
  if (projection_) projection_->convolution.collect_p2(saved.child(projection_child()), units);
}

void ResidualBlock::collect_parameters(std::vector<Parameter*>& parameters) {
  if (projection_) {
    projection_->convolution.collect_parameters(parameters);
    projection_->norm.collect_parameters(parameters);
  }
  first_.collect_parameters(parameters);
  for (auto& layer : inner_) layer->collect_parameters(parameters);
  last_.collect_parameters(parameters);
}

Values BatchNormReluConv2d::forward(Values values, Context& context, Saved& saved) {
  return {convolution_.forward(norm_.forward(std::move(values), /*relu=*/true, context, saved))};
}

Values BatchNormReluConv2d::backward_p1(Values values, Context&, Saved& saved) {
  const auto [x, scales] = BatchNormRows::take(saved);
  at::Tensor dy = as_contiguous(std::move(values[0]));
  at::Tensor dx = convolution_.input_gradient(dy, x.sizes());
  const at::Tensor sums = norm_.backward_sums(dx, x, scales, /*relu=*/true);
  const bool trainable = convolution_.weight().trainable();
  at::Tensor input;  // input of the convolution
  if (trainable) input = exclusively_owned(x) ? x : at::empty_like(x);
  norm_.backward(dx, x, scales, sums, /*relu=*/true, dx, input);
  if (trainable) {
    saved.keep_until_p2(std::move(input));
    saved.keep_until_p2(std::move(dy));
  }
  return {std::move(dx)};
}

void BatchNormReluConv2d::backward_p2(std::span<Saved* const> saved) {
  for (const Saved* one : saved) {
    TWOBP_CHECK(one->p2_count() == 2, "backward-p2 of convolution ", convolution_.weight().name(),
                " runs before its backward-p1: run it after that, once");
    convolution_.add_weight_gradient(one->p2(0), one->p2(1));
  }
}

void BatchNormReluConv2d::collect_p2(Saved& saved, std::vector<P2Unit>& units) {
  if (convolution_.weight().trainable()) units.push_back({this, &saved});
}

void BatchNormReluConv2d::collect_parameters(std::vector<Parameter*>& parameters) {
  norm_.collect_parameters(parameters);
  parameters.push_back(&convolution_.weight());
}

}  // namespace twobp
