#include <algorithm>
#include <map>
#include <memory>

#include "twobp/core/check.h"
#include "twobp/pipeline/memory/memory_meter.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/stage.h"
#include "twobp/train/update/optimizer.h"
#include "twobp/train/update/rank_update.h"

namespace twobp {

WeightUses::WeightUses(Pipeline& pipeline) : layers(static_cast<int>(pipeline.model().layers.size())) {
  struct Known {
    size_t index = 0;
    std::vector<int64_t> sizes;
  };
  std::map<std::string, Known> known;
  const std::string last = last_matrix(pipeline.model());
  const auto& specs = pipeline.model().layers;
  int layer = 0;
  for (int s = 0; s < pipeline.stages(); ++s) {
    for (int i = 0; i < pipeline.split()[s]; ++i, ++layer) {
      // For layers of other processes, the model's description is enough; making a layer allocates nothing.
      const bool local = pipeline.has_stage(s);
      std::unique_ptr<Layer> described;
      std::vector<Parameter*> parameters;
      if (local) {
        parameters = pipeline.stage(s).parameters(i);
      } else {
        described = specs[layer].make();
        parameters = parameters_of(*described);
      }
      for (Parameter* parameter : parameters) {
        const auto [at, is_new] = known.try_emplace(parameter->name(), Known{all.size(), parameter->sizes()});
        if (is_new) {
          all.emplace_back();
          if (!parameter->counts_tokens()) numel += parameter->numel() * parameter->share().of;
          for (const ParameterPart& part : parameter->parts()) names.push_back(part.name);
        }
        TWOBP_CHECK(parameter->sizes() == at->second.sizes, "tied parameter ", parameter->name(), " has two shapes");
        std::vector<WeightUse>& uses = all[at->second.index].uses;
        const bool first_here =
            local && std::none_of(uses.begin(), uses.end(), [](const WeightUse& use) { return use.parameter; });
        if (first_here) weights.push_back(parameter);
        uses.push_back({local ? parameter : nullptr, layer, s, pipeline.rank_of_stage()[s], parameter->trainable(),
                        in_hidden_layer(*parameter, last)});
      }
    }
  }
  if (!pipeline.world().devices.empty()) return;
  const MemoryMeter::Watch watch(pipeline.meter());
  for (UsedWeight& weight : all) {
    const WeightUse& first = weight.uses.front();
    const bool one_rank =
        std::ranges::all_of(weight.uses, [&](const WeightUse& use) { return use.rank == first.rank; });
    if (first.parameter == nullptr || first.parameter->is_buffer() || !(one_rank || pipeline.world().all_local))
      continue;
    weight.shared = !one_rank;
    for (size_t i = 1; weight.shared && i < weight.uses.size(); ++i) weight.uses[i].parameter->tie_to(*first.parameter);
    if (first.trainable && weight.uses.size() == 2) first.parameter->share_grad(*weight.uses[1].parameter);
  }
}

Parameter* UsedWeight::on(int rank) const {
  if (shared && uses.front().rank != rank) return nullptr;
  const auto here = std::ranges::find(uses, rank, &WeightUse::rank);
  return here == uses.end() ? nullptr : here->parameter;
}

std::set<int> UsedWeight::ranks_of_tied(int rank) const {
  std::set<int> ranks;
  if (uses.size() < 2 || !uses.front().trainable) return ranks;
  for (const WeightUse& use : uses) ranks.insert(use.rank);
  return ranks.contains(rank) ? ranks : std::set<int>();
}

}  // namespace twobp
