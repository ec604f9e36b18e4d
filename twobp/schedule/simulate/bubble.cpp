#include "twobp/schedule/simulate/bubble.h"

#include <array>

namespace twobp {

std::string_view bubble_cause_name(BubbleCause cause) {
  constexpr std::array<std::string_view, kBubbleCauses> kNames = {"start-up", "dependency", "communication",
                                                                  "imbalance", "nothing left to fill"};
  return kNames.at(static_cast<size_t>(cause));
}

void book_tails(Simulation& simulation, const std::vector<double>& done) {
  simulation.step_seconds = *std::max_element(done.begin(), done.end());
  for (size_t rank = 0; rank < done.size(); ++rank) {
    const double tail = simulation.step_seconds - done[rank];
    simulation.ranks[rank].idle[static_cast<int>(IdleCause::kTail)] = tail;
    simulation.ranks[rank].bubble[static_cast<int>(BubbleCause::kNothing)] += tail;
  }
}

void book_imbalance(Simulation& simulation) {
  double busiest = 0;
  for (const auto& rank : simulation.ranks) busiest = std::max(busiest, rank.busy);
  for (auto& rank : simulation.ranks) {
    double left = busiest - rank.busy;
    if (left <= 1e-12 * busiest) continue;  // the same work, summed in another order
    for (const BubbleCause from :
         {BubbleCause::kNothing, BubbleCause::kDependency, BubbleCause::kStartUp, BubbleCause::kCommunication}) {
      double& seconds = rank.bubble[static_cast<int>(from)];
      const double taken = std::min(seconds, left);
      seconds -= taken;
      left -= taken;
      rank.bubble[static_cast<int>(BubbleCause::kImbalance)] += taken;
    }
  }
}

}  // namespace twobp
