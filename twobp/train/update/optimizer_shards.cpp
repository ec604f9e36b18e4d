#include "twobp/train/update/optimizer_shards.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/core/wait.h"
#include "twobp/transport/message.h"

namespace twobp {
namespace {

// Small pieces are sent together.
constexpr int64_t kMessageBytes = 4 << 20;
// A group has at least so many numbers: about those of a bucket.
constexpr int64_t kGroupNumbers = 6 << 20;

Tag tag_of(int64_t step, size_t message) {
  return {step, static_cast<int>(message), 0, MessageKind::kWeights};
}

int64_t numbers_of(const std::vector<UpdateCost>& costs, const std::vector<size_t>& which) {
  return std::accumulate(which.begin(), which.end(), int64_t{0},
                         [&](int64_t sum, size_t i) { return sum + costs[i].numbers; });
}

// Cuts the parameters of a group, one after the other, where a replica's part of them ends. `ends`: by replica, from 0
// to 1.
void cut_group(const std::vector<UpdateCost>& costs, const std::vector<size_t>& group, const std::vector<double>& ends,
               std::vector<std::vector<Cut>>& cuts) {
  const auto all = static_cast<double>(numbers_of(costs, group));
  double first = 0;
  int owner = 0;
  for (const size_t i : group) {
    const int64_t numbers = costs[i].numbers;
    const int64_t unit = std::min(costs[i].unit, numbers);
    for (int64_t begin = 0; begin < numbers;) {
      const double units = std::round((ends[owner] * all - first) / static_cast<double>(unit));
      const bool last = owner + 1 == static_cast<int>(ends.size());
      const int64_t end = last ? numbers : std::min(numbers, unit * static_cast<int64_t>(std::max(units, 0.0)));
      if (end > begin) cuts[i].push_back({owner, begin, end});
      begin = std::max(begin, end);
      if (begin < numbers) ++owner;
    }
    first += static_cast<double>(numbers);
  }
}

}  // namespace

std::vector<std::vector<Cut>> share_out(const std::vector<UpdateCost>& costs, int replicas) {
  std::vector<std::vector<Cut>> cuts(costs.size());
  std::vector<size_t> whole, rest;
  for (size_t i = costs.size(); i-- > 0;) (costs[i].work > 0 ? whole : rest).push_back(i);
  std::ranges::reverse(whole);
  std::ranges::stable_sort(whole, std::greater(), [&](size_t i) { return std::pair(costs[i].work, costs[i].numbers); });
  std::vector<std::pair<int64_t, int64_t>> loads(replicas);  // work, numbers
  for (const size_t i : whole) {
    const auto least = std::ranges::min_element(loads);
    cuts[i] = {{static_cast<int>(least - loads.begin()), 0, costs[i].numbers}};
    least->first += costs[i].work;
    least->second += costs[i].numbers;
  }
  const double mean = static_cast<double>(numbers_of(costs, whole) + numbers_of(costs, rest)) / replicas;
  std::vector<double> ends;  // of what each replica lacks
  for (const auto& [work, numbers] : loads)
    ends.push_back((ends.empty() ? 0 : ends.back()) + std::max(0.0, mean - static_cast<double>(numbers)));
  for (double& end : ends) end = ends.back() > 0 ? end / ends.back() : 1;
  std::vector<size_t> group;
  for (size_t k = 0; k < rest.size(); ++k) {
    group.push_back(rest[k]);
    if (k + 1 < rest.size() && numbers_of(costs, group) < kGroupNumbers) continue;
    cut_group(costs, group, ends, cuts);
    group.clear();
  }
  return cuts;
}

OptimizerShards::OptimizerShards(Transport& replicas, std::vector<Parameter*> parameters,
                                 const std::vector<UpdateCost>& costs)
    : replicas_(replicas), parameters_(std::move(parameters)) {
  const std::vector<std::vector<Cut>> cuts = share_out(costs, replicas.size());
  for (size_t i = 0; i < cuts.size(); ++i) cuts_[parameters_[i]] = cuts[i];
  for (int owner = 0; owner < replicas.size(); ++owner) {
    int64_t bytes = kMessageBytes;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      for (const Cut& cut : cuts[i]) {
        if (cut.owner != owner) continue;
        if (bytes >= kMessageBytes) {
          messages_.push_back({owner, {}});
          bytes = 0;
        }
        messages_.back().pieces.push_back({parameters_[i], cut});
        bytes += (cut.end - cut.begin) * static_cast<int64_t>(parameters_[i]->master.element_size());
      }
    }
  }
}

const Cut* OptimizerShards::own(const Parameter* parameter) const {
  const std::vector<Cut>& cuts = cuts_of(parameter);
  const auto here = std::ranges::find(cuts, replicas_.rank(), &Cut::owner);
  return here == cuts.end() ? nullptr : &*here;
}

void OptimizerShards::send(int64_t step) {
  if (GroupSums* const sums = own_copies()) {
    std::vector<at::Tensor> masters;
    std::vector<int> owners;
    for (const Message& message : messages_) {
      for (const Piece& piece : message.pieces) {
        masters.push_back(piece.master());
        owners.push_back(message.owner);
      }
    }
    copies_.emplace(*sums, sums->broadcast(masters, owners));
    return;
  }
  for (size_t m = 0; m < messages_.size(); ++m) {
    if (messages_[m].owner != replicas_.rank()) continue;
    Values values;
    for (const Piece& piece : messages_[m].pieces) values.push_back(piece.master());
    for (int i = 1; i < replicas_.size(); ++i) {
      replicas_.isend((replicas_.rank() + i) % replicas_.size(), tag_of(step, m), values);
    }
  }
}

void OptimizerShards::receive(int64_t step, const Patience& patience) {
  if (copies_) {
    wait_for(*copies_, patience);
    copies_.reset();
    return take_over();
  }
  for (size_t m = 0; m < messages_.size(); ++m) {
    const Message& message = messages_[m];
    if (message.owner == replicas_.rank()) continue;
    MessageWait arrival(replicas_, message.owner, tag_of(step, m));
    wait_for(arrival, patience);
    const Values& values = arrival.values;
    TWOBP_CHECK(values.size() == message.pieces.size(), "replica ", message.owner, " sent ", values.size(),
                " updated weights, ", message.pieces.size(), " were expected");
    for (size_t i = 0; i < values.size(); ++i) {
      const Piece& piece = message.pieces[i];
      const at::Tensor master = piece.master();
      TWOBP_CHECK(values[i].sizes() == master.sizes() && values[i].scalar_type() == master.scalar_type(), "replica ",
                  message.owner, " has another shape or type for ", piece.parameter->name());
      master.copy_(values[i]);
    }
  }
  take_over();
}

GroupSums* OptimizerShards::own_copies() const {
  if (parameters_.empty()) return nullptr;
  GroupSums* const sums = group_sums_for(replicas_, parameters_[0]->master);
  const auto taken = [&](const Parameter* parameter) { return sums->takes(parameter->master); };
  return sums && std::ranges::all_of(parameters_, taken) ? sums : nullptr;
}

void OptimizerShards::take_over() const {
  for (Parameter* parameter : parameters_) {
    const Cut* const here = own(parameter);
    if (here != nullptr && here->end - here->begin == parameter->numel()) continue;
    parameter->forget_grad();
    parameter->refresh_value();
  }
}

void OptimizerShards::forget_gradients() {
  for (Parameter* parameter : parameters_) parameter->forget_grad();
}

}  // namespace twobp
