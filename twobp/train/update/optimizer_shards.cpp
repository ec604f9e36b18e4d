#include "twobp/train/update/optimizer_shards.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/core/patience.h"

namespace twobp {
namespace {

// Small parameters are sent together.
constexpr int64_t kMessageBytes = 4 << 20;

Tag tag_of(int64_t step, size_t message) {
  return {step, static_cast<int>(message), 0, MessageKind::kWeights};
}

}  // namespace

std::vector<int> assign_replicas(const std::vector<int64_t>& sizes, int replicas) {
  std::vector<size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return sizes[a] > sizes[b]; });
  std::vector<int64_t> load(replicas, 0);
  std::vector<int> owners(sizes.size(), 0);
  for (const size_t i : order) {
    const auto least = std::min_element(load.begin(), load.end());
    owners[i] = static_cast<int>(least - load.begin());
    *least += sizes[i];
  }
  return owners;
}

OptimizerShards::OptimizerShards(Transport& replicas, std::vector<Parameter*> parameters)
    : replicas_(replicas), parameters_(std::move(parameters)) {
  std::vector<int64_t> sizes;
  for (const Parameter* parameter : parameters_) sizes.push_back(parameter->numel());
  owners_ = assign_replicas(sizes, replicas.size());
  for (int owner = 0; owner < replicas.size(); ++owner) {
    int64_t bytes = kMessageBytes;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (owners_[i] != owner) continue;
      if (bytes >= kMessageBytes) {
        messages_.push_back({owner, {}});
        bytes = 0;
      }
      messages_.back().parameters.push_back(parameters_[i]);
      bytes += static_cast<int64_t>(parameters_[i]->master.nbytes());
    }
  }
}

void OptimizerShards::send(int64_t step) {
  for (size_t m = 0; m < messages_.size(); ++m) {
    if (messages_[m].owner != replicas_.rank()) continue;
    Values values;
    for (const Parameter* parameter : messages_[m].parameters) values.push_back(parameter->master);
    for (int i = 1; i < replicas_.size(); ++i) {
      replicas_.isend((replicas_.rank() + i) % replicas_.size(), tag_of(step, m), values);
    }
  }
}

void OptimizerShards::receive(int64_t step, double timeout) {
  const double deadline = awake_seconds() + timeout;
  for (size_t m = 0; m < messages_.size(); ++m) {
    const Message& message = messages_[m];
    if (message.owner == replicas_.rank()) continue;
    const Values values =
        replicas_.receive(message.owner, tag_of(step, m), std::max(deadline - awake_seconds(), 1e-3));
    TWOBP_CHECK(values.size() == message.parameters.size(), "replica ", message.owner, " sent ",
                values.size(), " updated weights, ", message.parameters.size(), " were expected");
    for (size_t i = 0; i < values.size(); ++i) {
      Parameter& parameter = *message.parameters[i];
      TWOBP_CHECK(values[i].sizes() == parameter.master.sizes(), "replica ", message.owner,
                  " has another shape for ", parameter.name());
      parameter.master.copy_(values[i]);
      parameter.forget_grad();
      parameter.refresh_value();
    }
  }
}

void OptimizerShards::forget_gradients() {
  for (Parameter* parameter : parameters_) parameter->forget_grad();
}

}  // namespace twobp
