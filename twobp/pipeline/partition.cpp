#include "twobp/pipeline/partition.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "twobp/core/check.h"

namespace twobp {

std::vector<int> balanced_split(const std::vector<double>& layer_seconds, int stages) {
  const int layers = static_cast<int>(layer_seconds.size());
  TWOBP_CHECK(stages >= 1 && stages <= layers, "the model has ", layers, " layers, too few for ", stages,
              " stages: use at most ", layers, " (pipeline.stages)");
  std::vector<double> prefix(layers + 1, 0);
  std::partial_sum(layer_seconds.begin(), layer_seconds.end(), prefix.begin() + 1);
  // best[s][l]: the slowest stage's seconds when the first l layers make s stages; cut[s][l]: where its last
  // begins.
  std::vector<std::vector<double>> best(
      stages + 1, std::vector<double>(layers + 1, std::numeric_limits<double>::infinity()));
  std::vector<std::vector<int>> cut(stages + 1, std::vector<int>(layers + 1, 0));
  best[0][0] = 0;
  for (int s = 1; s <= stages; ++s) {
    for (int l = s; l <= layers; ++l) {
      for (int begin = s - 1; begin < l; ++begin) {
        const double slowest = std::max(best[s - 1][begin], prefix[l] - prefix[begin]);
        if (slowest <= best[s][l]) {
          best[s][l] = slowest;
          cut[s][l] = begin;
        }
      }
    }
  }
  std::vector<int> split(stages);
  for (int s = stages, l = layers; s > 0; l = cut[s][l], --s) split[s - 1] = l - cut[s][l];
  return split;
}

double imbalance(const std::vector<double>& stage_seconds) {
  const double sum = std::accumulate(stage_seconds.begin(), stage_seconds.end(), 0.0);
  const double slowest = *std::max_element(stage_seconds.begin(), stage_seconds.end());
  return sum > 0 ? slowest * static_cast<double>(stage_seconds.size()) / sum : 1;
}

void check_split(const std::vector<int>& split, int layers, int stages) {
  const bool positive = std::all_of(split.begin(), split.end(), [](int n) { return n >= 1; });
  const int sum = std::accumulate(split.begin(), split.end(), 0);
  TWOBP_CHECK(static_cast<int>(split.size()) == stages && positive && sum == layers,
              "pipeline.split must be ", stages, " counts of at least 1 that sum to the model's ", layers,
              " layers; it has ", split.size(), " that sum to ", sum);
}

}  // namespace twobp
