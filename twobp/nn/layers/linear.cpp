#include "twobp/nn/layers/linear.h"

#include "twobp/core/check.h"
#include "twobp/nn/kernels/products/products.h"
#include "twobp/nn/kernels/products/rows.h"

namespace twobp {
namespace {

int64_t total_rows(const std::vector<ParameterPart>& parts) {
  int64_t rows = 0;
  for (const auto& part : parts) rows += part.rows;
  return rows;
}

std::vector<int64_t> with_last(at::IntArrayRef sizes, int64_t last) {
  std::vector<int64_t> out(sizes.begin(), sizes.end());
  out.back() = last;
  return out;
}

Parameter weight_of(const std::vector<ParameterPart>& parts, int64_t in, double init_std, at::ScalarType dtype,
                    bool transposed) {
  const int64_t out = total_rows(parts);
  if (!transposed) return Parameter(parts, {out, in}, dtype, init_std);
  TWOBP_CHECK(parts.size() == 1, "Linear ", parts.front().name, ": a transposed weight has one part");
  Projections projections = parts.front().projections;
  projections.columns = true;
  Parameter weight({{parts.front().name, in, projections}}, {in, out}, dtype, init_std);
  weight.store_transposed();
  return weight;
}

std::vector<ParameterPart> biases_of(std::vector<ParameterPart> parts) {
  constexpr std::string_view kWeight = ".weight";
  for (ParameterPart& part : parts) {
    if (part.name.ends_with(kWeight)) part.name.resize(part.name.size() - kWeight.size());
    part.name += ".bias";
    part.projections = {};
  }
  return parts;
}

}  // namespace

Linear::Linear(std::vector<ParameterPart> parts, int64_t in, double init_std, at::ScalarType dtype, bool bias,
               bool transposed)
    : weight_(weight_of(parts, in, init_std, dtype, transposed)) {
  if (bias) bias_.emplace(biases_of(parts), std::vector<int64_t>{total_rows(parts)}, compute_type(dtype), 0);
}

Linear::Linear(std::vector<ParameterPart> parts, int64_t in, double init_std, at::ScalarType dtype,
               std::vector<ParameterPart> bias)
    : weight_(parts, {total_rows(parts), in}, dtype, init_std) {
  bias_.emplace(std::move(bias), std::vector<int64_t>{total_rows(parts)}, compute_type(dtype), 0);
}

Values Linear::forward(Values x, Context& context, Saved& saved) {
  const at::Tensor weight = this->weight();
  TWOBP_CHECK(x.size() == 1 && x[0].size(-1) == weight.size(1), "Linear ", weight_.name(), " takes (..., ",
              weight.size(1), "), got ", x.empty() ? c10::IntArrayRef{} : x[0].sizes());
  TWOBP_CHECK(x[0].scalar_type() == weight.scalar_type(), "Linear ", weight_.name(), " has dtype ",
              c10::toString(weight.scalar_type()), ", got ", c10::toString(x[0].scalar_type()));
  at::Tensor input = as_matrix(x[0]);
  at::Tensor y = empty_rows(with_last(x[0].sizes(), weight.size(0)), x[0].options(), padded_);
  at::Tensor y_matrix = as_matrix(y);
  if (bias_) {
    multiply_and_add(y_matrix, input, weight.t(), bias_->value);
  } else {
    multiply_into(y_matrix, input, weight.t());
  }
  if (context.keeps() && weight_.trainable()) saved.keep_until_p2(std::move(input));
  return {std::move(y)};
}

Values Linear::backward_p1(Values dy, Context&, Saved& saved) {
  const bool trainable = weight_.trainable();
  const at::Tensor weight = this->weight();
  TWOBP_CHECK(!trainable || saved.p2_count() == 1, "backward-p1 of Linear ", weight_.name(),
              " does not find exactly one saved tensor, its input: it runs once after each forward");
  at::Tensor gradient = as_matrix(dy[0]);
  TWOBP_CHECK(gradient.size(1) == weight.size(0) && (!trainable || gradient.size(0) == saved.p2(0).size(0)),
              "the gradient ", dy[0].sizes(), " does not fit the output of Linear ", weight_.name(), ", rows of ",
              weight.size(0));
  at::Tensor dx = at::empty(with_last(dy[0].sizes(), weight.size(1)), dy[0].options());
  at::Tensor dx_matrix = as_matrix(dx);
  multiply_into(dx_matrix, gradient, weight);
  if (bias_ && bias_->trainable()) add_sum_of_rows(bias_->grad_to_add(), gradient);
  if (trainable) saved.keep_until_p2(std::move(gradient));
  return {std::move(dx)};
}

void Linear::backward_p2(std::span<Saved* const> saved) {
  const auto accumulate = [this](const at::Tensor& gradient, const at::Tensor& input) {
    if (weight_.transposed()) {
      weight_.accumulate_product(input.t(), gradient);
    } else {
      weight_.accumulate_product(gradient.t(), input);
    }
  };
  if (saved.size() == 1) return accumulate(saved[0]->p2(1), saved[0]->p2(0));
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> gradients;
  for (const Saved* one : saved) {
    inputs.push_back(one->p2(0));
    gradients.push_back(one->p2(1));
  }
  accumulate(concatenate_rows(gradients), concatenate_rows(inputs));
}

void Linear::collect_p2(Saved& saved, std::vector<P2Unit>& units) {
  if (weight_.trainable()) units.push_back({this, &saved});
}
void Linear::collect_parameters(std::vector<Parameter*>& parameters) {
  parameters.push_back(&weight_);
  if (bias_) parameters.push_back(&*bias_);
}

}  // namespace twobp
