#include "twobp/train/generator.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include <ATen/core/LegacyTypeDispatch.h>

#include "twobp/core/check.h"

namespace twobp {

int64_t sample(const at::Tensor& logits, const SamplingOptions& options, std::mt19937_64& random) {
  const at::Tensor scores = logits.cpu().to(at::kDouble).contiguous();
  const double* score = scores.const_data_ptr<double>();
  const int64_t vocab = scores.numel();
  const double* best = std::max_element(score, score + vocab);
  TWOBP_CHECK(std::isfinite(*best), "the model's logits are not finite: its weights are damaged");
  if (options.temperature == 0) return best - score;

  std::vector<int64_t> order(static_cast<size_t>(vocab));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return score[a] > score[b]; });
  std::vector<double> weight;
  weight.reserve(order.size());
  for (const int64_t id : order) weight.push_back(std::exp((score[id] - *best) / options.temperature));
  const double sum = std::accumulate(weight.begin(), weight.end(), 0.0);
  double kept = 0;
  size_t count = 0;
  while (count < weight.size() && (count == 0 || kept < options.top_p * sum)) kept += weight[count++];
  // The upper 53 bits give a number in [0, 1). Unlike the standard distributions, this is the same everywhere.
  double point = static_cast<double>(random() >> 11) * 0x1p-53 * kept;
  for (size_t i = 0; i < count; ++i) {
    point -= weight[i];
    if (point < 0) return order[i];
  }
  return order[count - 1];
}

Generator::Generator(const ModelSpec& model, const Device& device)
    : device_(device), cache_until_(model.cache_until), saved_(model.layers.size()) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const OnStream here(device_.compute());
  std::map<std::string, Parameter*> known;
  for (const LayerSpec& spec : model.layers) {
    layers_.push_back(spec.make());
    for (Parameter* parameter : parameters_of(*layers_.back())) {
      const auto [first, is_new] = known.try_emplace(parameter->name(), parameter);
      parameter->freeze();
      if (is_new) {
        parameter->allocate_value(0);
        parameter->move_to(device_.where());
        parameters_.push_back(parameter);
      } else {
        parameter->value = first->second->value;  // a tied weight
        parameter->master = first->second->master;
      }
    }
  }
}

at::Tensor Generator::next_logits(const std::vector<int64_t>& tokens, int64_t past, int64_t capacity) {
  const auto count = static_cast<int64_t>(tokens.size()) - past;
  const Fields fields = {{"input_ids", at::tensor(at::ArrayRef<int64_t>(tokens).slice(past)).view({1, count})}};
  Context context;
  context.fields = &fields;
  context.training = false;
  context.generating = true;
  context.past = past;
  context.capacity = capacity;
  Values x;
  for (size_t i = 0; i < layers_.size(); ++i) {
    // The head is only needed at the last position.
    if (i + 1 == layers_.size()) x[0] = x[0].narrow(1, count - 1, 1).contiguous();
    x = layers_[i]->forward(std::move(x), context, saved_[i]);
  }
  return x[0].reshape({-1});
}

void Generator::generate(const std::vector<int64_t>& prompt, int64_t count, const SamplingOptions& options,
                         const std::function<bool(int64_t)>& on_token) {
  TWOBP_CHECK(!prompt.empty(), "generation needs a prompt of at least one token");
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const OnStream here(device_.compute());
  std::mt19937_64 random(options.seed);
  std::vector<int64_t> tokens = prompt;
  const auto capacity = static_cast<int64_t>(prompt.size()) + count;
  int64_t past = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (past == cache_until_) past = 0;
    const at::Tensor logits = next_logits(tokens, past, capacity);
    past = static_cast<int64_t>(tokens.size());
    tokens.push_back(sample(logits, options, random));
    if (!on_token(tokens.back())) return;
  }
}

}  // namespace twobp
