#include "twobp/nn/layers/lora_linear.h"

#include <algorithm>
#include <cmath>

#include "twobp/core/check.h"
#include "twobp/nn/kernels/products/products.h"

namespace twobp {
namespace {

bool targeted(const std::string& weight_name, const LoraOptions& lora) {
  const std::string module = module_of(weight_name);
  return std::any_of(lora.targets.begin(), lora.targets.end(),
                     [&](const std::string& target) { return module == target || module.ends_with("." + target); });
}

}  // namespace

std::string module_of(const std::string& weight_name) {
  constexpr std::string_view kWeight = ".weight";
  return weight_name.ends_with(kWeight) ? weight_name.substr(0, weight_name.size() - kWeight.size()) : weight_name;
}

bool is_adapter(const std::string& parameter_name) {
  return parameter_name.ends_with(".lora_A.weight") || parameter_name.ends_with(".lora_B.weight");
}

bool LoraLinear::adapts(const std::vector<ParameterPart>& parts, const LoraOptions& lora) {
  return lora.rank > 0 &&
         std::any_of(parts.begin(), parts.end(), [&](const ParameterPart& part) { return targeted(part.name, lora); });
}

LoraLinear::LoraLinear(const std::vector<ParameterPart>& parts, int64_t in, double init_std, at::ScalarType dtype,
                       const LoraOptions& lora, bool bias, bool transposed)
    : base_(parts, in, init_std, dtype, bias, transposed), scale_(lora.scale()) {
  std::vector<Parameter*> frozen;
  base_.collect_parameters(frozen);
  for (Parameter* parameter : frozen) parameter->freeze();
  // Linear layers of PyTorch and PEFT start from a uniform distribution with variance 1 / (3 in).
  const double std = 1 / std::sqrt(3.0 * static_cast<double>(in));
  int64_t row = 0;
  for (const ParameterPart& part : parts) {
    if (targeted(part.name, lora)) {
      const std::string module = module_of(part.name);
      adapters_.push_back(std::make_unique<Adapter>(Adapter{
          Parameter({{module + ".lora_A.weight", lora.rank}}, {lora.rank, in}, dtype, std),
          Parameter({{module + ".lora_B.weight", part.rows, part.projections}}, {part.rows, lora.rank}, dtype, 0), row,
          part.rows}));
    }
    row += part.rows;
  }
  TWOBP_CHECK(!adapters_.empty(), "LoraLinear ", parts.front().name, ": no part is a target");
}

bool LoraLinear::trainable() const {
  return std::any_of(adapters_.begin(), adapters_.end(),
                     [](const auto& adapter) { return adapter->a.trainable() || adapter->b.trainable(); });
}

Values LoraLinear::forward(Values x, Context& context, Saved& saved) {
  const at::Tensor input = as_matrix(x[0]);
  Values y = base_.forward(std::move(x), context, saved.child(0));
  at::Tensor output = as_matrix(y[0]);
  const bool keeps = context.keeps() && trainable();
  if (keeps) saved.keep_until_p2(input);
  for (const auto& adapter : adapters_) {
    at::Tensor u = at::empty({input.size(0), adapter->a.value.size(0)}, input.options());
    multiply_into(u, input, adapter->a.value.t());
    at::Tensor rows = output.narrow(1, adapter->row, adapter->rows);
    multiply_add(rows, u, adapter->b.value.t(), scale_);
    if (keeps) saved.keep_until_p2(std::move(u));
  }
  return y;
}

Values LoraLinear::backward_p1(Values dy, Context& context, Saved& saved) {
  const bool keeps = trainable();
  TWOBP_CHECK(!keeps || saved.p2_count() == 1 + adapters_.size(),
              "backward-p1 of LoraLinear does not find what forward kept: it runs once after each forward");
  const at::Tensor gradient = as_matrix(dy[0]);
  Values dx = base_.backward_p1(std::move(dy), context, saved.child(0));
  at::Tensor input_gradient = as_matrix(dx[0]);
  if (keeps) saved.keep_until_p2(gradient);
  for (const auto& adapter : adapters_) {
    at::Tensor v = at::empty({gradient.size(0), adapter->b.value.size(1)}, gradient.options());
    multiply_into(v, gradient.narrow(1, adapter->row, adapter->rows), adapter->b.value);
    v.mul_(scale_);
    multiply_add(input_gradient, v, adapter->a.value);
    if (keeps) saved.keep_until_p2(std::move(v));
  }
  return dx;
}

void LoraLinear::backward_p2(std::span<Saved* const> saved) {
  const size_t n = adapters_.size();
  for (const Saved* one : saved) {
    const at::Tensor& input = one->p2(0);
    const at::Tensor& gradient = one->p2(1 + n);
    for (size_t i = 0; i < n; ++i) {
      Adapter& adapter = *adapters_[i];
      const at::Tensor& u = one->p2(1 + i);
      const at::Tensor& v = one->p2(2 + n + i);
      if (adapter.a.trainable()) adapter.a.accumulate_product(v.t(), input);
      if (!adapter.b.trainable()) continue;
      adapter.b.accumulate_product(gradient.narrow(1, adapter.row, adapter.rows).t(), u * scale_);
    }
  }
}

void LoraLinear::collect_p2(Saved& saved, std::vector<P2Unit>& units) {
  if (trainable()) units.push_back({this, &saved});
}

void LoraLinear::collect_parameters(std::vector<Parameter*>& parameters) {
  base_.collect_parameters(parameters);
  for (const auto& adapter : adapters_) {
    parameters.push_back(&adapter->a);
    parameters.push_back(&adapter->b);
  }
}

std::unique_ptr<Layer> make_linear(const std::vector<ParameterPart>& parts, int64_t in, double init_std,
                                   at::ScalarType dtype, const LoraOptions& lora, bool bias, bool transposed) {
  if (LoraLinear::adapts(parts, lora)) {
    return std::make_unique<LoraLinear>(parts, in, init_std, dtype, lora, bias, transposed);
  }
  return std::make_unique<Linear>(parts, in, init_std, dtype, bias, transposed);
}

}  // namespace twobp
