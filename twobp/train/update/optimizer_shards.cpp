#include "twobp/train/update/optimizer_shards.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/core/wait.h"
#include "twobp/transport/message.h"

namespace twobp {
namespace {

// Small parameters are sent together.
constexpr int64_t kMessageBytes = 4 << 20;

Tag tag_of(int64_t step, size_t message) {
  return {step, static_cast<int>(message), 0, MessageKind::kWeights};
}

}  // namespace

std::vector<int> assign_replicas(const std::vector<UpdateCost>& costs, int replicas) {
  const auto weight = [](const UpdateCost& cost) { return std::pair(cost.work, cost.numbers); };
  std::vector<size_t> order(costs.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return weight(costs[a]) > weight(costs[b]); });
  std::vector<UpdateCost> loads(replicas);
  std::vector<int> owners(costs.size(), 0);
  for (const size_t i : order) {
    const bool by_work = costs[i].work > 0;
    const auto least = std::min_element(loads.begin(), loads.end(), [&](const auto& a, const auto& b) {
      return by_work ? weight(a) < weight(b) : a.numbers < b.numbers;
    });
    owners[i] = static_cast<int>(least - loads.begin());
    least->numbers += costs[i].numbers;
    least->work += costs[i].work;
  }
  return owners;
}

OptimizerShards::OptimizerShards(Transport& replicas, std::vector<Parameter*> parameters,
                                 const std::vector<UpdateCost>& costs)
    : replicas_(replicas), parameters_(std::move(parameters)) {
  const std::vector<int> owners = assign_replicas(costs, replicas.size());
  for (size_t i = 0; i < owners.size(); ++i) owners_[parameters_[i]] = owners[i];
  for (int owner = 0; owner < replicas.size(); ++owner) {
    int64_t bytes = kMessageBytes;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (owners[i] != owner) continue;
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
  if (GroupSums* const sums = own_copies()) {
    std::vector<at::Tensor> masters;
    std::vector<int> owners;
    for (const Parameter* parameter : parameters_) {
      masters.push_back(parameter->master);
      owners.push_back(owner_of(parameter));
    }
    copies_.emplace(*sums, sums->broadcast(masters, owners));
    return;
  }
  for (size_t m = 0; m < messages_.size(); ++m) {
    if (messages_[m].owner != replicas_.rank()) continue;
    Values values;
    for (const Parameter* parameter : messages_[m].parameters) values.push_back(parameter->master);
    for (int i = 1; i < replicas_.size(); ++i) {
      replicas_.isend((replicas_.rank() + i) % replicas_.size(), tag_of(step, m), values);
    }
  }
}

void OptimizerShards::receive(int64_t step, const Patience& patience) {
  if (copies_) {
    wait_for(*copies_, patience);
    copies_.reset();
    for (Parameter* parameter : parameters_) {
      if (!owns(parameter)) take_over(*parameter);
    }
    return;
  }
  for (size_t m = 0; m < messages_.size(); ++m) {
    const Message& message = messages_[m];
    if (message.owner == replicas_.rank()) continue;
    MessageWait arrival(replicas_, message.owner, tag_of(step, m));
    wait_for(arrival, patience);
    const Values& values = arrival.values;
    TWOBP_CHECK(values.size() == message.parameters.size(), "replica ", message.owner, " sent ", values.size(),
                " updated weights, ", message.parameters.size(), " were expected");
    for (size_t i = 0; i < values.size(); ++i) {
      Parameter& parameter = *message.parameters[i];
      TWOBP_CHECK(values[i].sizes() == parameter.master.sizes(), "replica ", message.owner, " has another shape for ",
                  parameter.name());
      parameter.master.copy_(values[i]);
      take_over(parameter);
    }
  }
}

GroupSums* OptimizerShards::own_copies() const {
  if (parameters_.empty()) return nullptr;
  GroupSums* const sums = group_sums_for(replicas_, parameters_[0]->master);
  const auto taken = [&](const Parameter* parameter) { return sums->takes(parameter->master); };
  return sums && std::ranges::all_of(parameters_, taken) ? sums : nullptr;
}

void OptimizerShards::take_over(Parameter& parameter) {
  parameter.forget_grad();
  parameter.refresh_value();
}

void OptimizerShards::forget_gradients() {
  for (Parameter* parameter : parameters_) parameter->forget_grad();
}

}  // namespace twobp
