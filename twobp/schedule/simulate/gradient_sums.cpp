#include <algorithm>
#include <numeric>

#include "twobp/schedule/simulate/links.h"
#include "twobp/schedule/simulate/simulator.h"

namespace twobp {

GradientSums::GradientSums(const Schedule& schedule, const std::vector<StageCost>& costs, const DataParallel& parallel)
    : schedule_(schedule),
      costs_(costs),
      parallel_(parallel),
      by_layer_(parallel.replicas > 1 && parallel.bucket_bytes > 0) {
  if (!by_layer_) return;
  for (const StageCost& cost : costs) {
    const auto layers = std::max<size_t>(1, cost.layers.size());  // a stage without layers counts as one
    layer_done_.emplace_back(layers, 0.0);
    auto& layer_of_piece = layer_of_piece_.emplace_back();
    if (cost.layers.empty()) layer_of_piece.assign(cost.p2_units, 0);
    for (size_t layer = cost.layers.size(); layer-- > 0;) {
      layer_of_piece.insert(layer_of_piece.end(), cost.layers[layer].p2_units, static_cast<int>(layer));
    }
  }
}

void GradientSums::pieces_ran(int stage, const StageModel& model, int first, int count, double begin) {
  if (!by_layer_) return;
  const auto& pieces = model.pieces;
  for (int i = first; i < first + count; ++i) {
    layer_done_[stage][layer_of_piece_[stage][i]] = begin + pieces[i + 1].begin - pieces[first].begin;
  }
}

void GradientSums::p1_ran(int stage, const StageModel& model, double begin) {
  if (!by_layer_) return;
  auto layer = layer_done_[stage].rbegin();
  for (const Growth& step : model.backward_p1.steps) {
    begin += step.seconds;
    if (step.p2_units == 0) *layer = begin;
    ++layer;
  }
}

void GradientSums::backward_ran(int stage, const StageModel& model, double begin) {
  if (!by_layer_) return;
  auto layer = layer_done_[stage].rbegin();
  for (const Growth& step : model.backward.steps) *layer++ = begin += step.seconds;
}

void GradientSums::wait(const std::vector<double>& stage_done, std::vector<RankState>& ranks,
                        std::vector<RankSimulation>& results) const {
  if (parallel_.replicas == 1) return;
  std::vector<double> now;
  for (const RankState& rank : ranks) now.push_back(rank.now);
  const std::vector<double> free_at = done(stage_done, now);
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (free_at[rank] <= now[rank]) continue;
    results[rank].exposed = free_at[rank] - now[rank];
    book_wait(results[rank], {now[rank], free_at[rank], now[rank], true, false, true});
    ranks[rank].now = free_at[rank];
  }
}

double GradientSums::transfer(double bytes, double of_experts) const {
  if (parallel_.bytes_per_second == 0) return 0;
  const double replicas = parallel_.replicas, experts = parallel_.experts, holders = replicas / experts;
  const double ring = 2 * (replicas - 1) / replicas, terms = (holders - 1) / holders * (experts + 1) / experts;
  return (ring * (bytes - of_experts) + terms * of_experts) / parallel_.bytes_per_second;
}

std::vector<double> GradientSums::done(const std::vector<double>& stage_done, const std::vector<double>& now) const {
  if (!by_layer_) return by_stage(stage_done, now);
  std::vector<double> link_free(schedule_.ranks.size(), 0);
  std::vector<double> all_done(schedule_.ranks.size(), 0);
  for (int stage = schedule_.stages - 1; stage >= 0; --stage) {
    const StageCost& cost = costs_[stage];
    const int rank = schedule_.rank_of_stage[stage];
    double bytes = 0;
    double of_experts = 0;
    double ready = 0;
    for (size_t layer = layer_done_[stage].size(); layer-- > 0;) {
      const double more = cost.layers.empty() ? cost.gradient_bytes : cost.layers[layer].gradient_bytes;
      if (more > 0) {
        bytes += more;
        of_experts += cost.layers.empty() ? 0 : cost.layers[layer].expert_gradient;
        ready = std::max(ready, parallel_.overlap ? layer_done_[stage][layer] : now[rank]);
      }
      if (bytes == 0 || (bytes < parallel_.bucket_bytes && layer > 0)) continue;
      link_free[rank] = std::max(link_free[rank], ready) + transfer(bytes, of_experts);
      all_done[rank] = link_free[rank] + parallel_.latency;
      bytes = of_experts = ready = 0;
    }
  }
  return all_done;
}

std::vector<double> GradientSums::by_stage(const std::vector<double>& stage_done,
                                           const std::vector<double>& now) const {
  std::vector<double> ready(schedule_.stages);
  for (int s = 0; s < schedule_.stages; ++s)
    ready[s] = parallel_.overlap ? stage_done[s] : now[schedule_.rank_of_stage[s]];
  std::vector<int> stages(schedule_.stages);
  std::iota(stages.begin(), stages.end(), 0);
  std::stable_sort(stages.begin(), stages.end(), [&](int a, int b) { return ready[a] < ready[b]; });
  std::vector<double> free_at(schedule_.ranks.size(), 0);
  for (const int stage : stages) {
    const double bytes = costs_[stage].gradient_bytes;
    if (bytes == 0) continue;
    double of_experts = 0;
    for (const LayerCost& layer : costs_[stage].layers) of_experts += layer.expert_gradient;
    const int rank = schedule_.rank_of_stage[stage];
    free_at[rank] = std::max(free_at[rank], ready[stage]) + parallel_.latency + transfer(bytes, of_experts);
  }
  return free_at;
}

}  // namespace twobp
