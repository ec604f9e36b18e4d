#include "twobp/schedule/simulate/links.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/core/text.h"

namespace twobp {
namespace {

void check_speed(double latency, double bytes_per_second, const std::string& what) {
  TWOBP_CHECK(latency >= 0 && latency <= kMostCost, what, ": latency is ", latency, ", must be from 0 to ", kMostCost);
  TWOBP_CHECK(std::isfinite(bytes_per_second) && bytes_per_second >= 0, what, ": bytes_per_second is ",
              bytes_per_second, ", must be finite and not negative (0: no limit)");
}

}  // namespace

Links::Links(const Schedule& schedule, const std::vector<StageCost>& costs, const SimulationOptions& options) {
  check_speed(options.message_seconds, options.bytes_per_second, "the link between two ranks");
  std::map<std::pair<int, int>, int> link_of;
  for (const SharedLink& shared : options.shared_links) {
    const std::string what = concat("shared link '", shared.name, "'");
    check_speed(shared.latency, shared.bytes_per_second, what);
    const int ranks = schedule.rank_count();
    for (const auto& [from, to] : shared.between) {
      TWOBP_CHECK(from >= 0 && from < ranks && to >= 0 && to < ranks && from != to, what, " names ranks ", from,
                  " and ", to, ": these must be two different ranks from 0 to ", ranks - 1);
      const auto [known, is_new] = link_of.emplace(std::pair(from, to), static_cast<int>(links_.size()));
      TWOBP_CHECK(is_new, what, " names ranks ", from, " and ", to,
                  known->second == static_cast<int>(links_.size())
                      ? " twice"
                      : concat(", as shared link '", options.shared_links[known->second].name, "' does"),
                  ": a message between two ranks takes one link");
    }
    links_.push_back({shared.latency, shared.bytes_per_second, 0});
  }
  const auto route = [&](int from_stage, int to_stage, double bytes) {
    const int from = schedule.rank_of_stage[from_stage];
    const int to = schedule.rank_of_stage[to_stage];
    if (from == to) return Route{};
    const auto [known, is_new] = link_of.emplace(std::pair(from, to), static_cast<int>(links_.size()));
    if (is_new) links_.push_back({options.message_seconds, options.bytes_per_second, 0});
    const double speed = links_[known->second].bytes_per_second;
    return Route{known->second, speed > 0 ? bytes / speed : 0};
  };
  forward_.resize(costs.size());
  backward_.resize(costs.size());
  for (size_t i = 0; i + 1 < costs.size(); ++i) {
    const int stage = static_cast<int>(i % schedule.stages);
    if (schedule.is_last(stage)) continue;
    forward_[i] = route(stage, stage + 1, costs[i].output_bytes);
    backward_[i + 1] = route(stage + 1, stage, costs[i + 1].input_gradient_bytes);
  }
}

double Links::send(const Route& route, double now) {
  Link& link = links_[route.link];
  link.free_at = std::max(now, link.free_at) + route.seconds;
  return link.free_at + link.latency;
}

std::vector<SharedLink> node_links(int ranks, int ranks_per_node, double latency, double bytes_per_second) {
  TWOBP_CHECK(ranks >= 1 && ranks_per_node >= 1, "node_links needs at least one rank, and one in each node, got ",
              ranks, " and ", ranks_per_node);
  std::vector<SharedLink> links;
  for (int first = 0; first < ranks; first += ranks_per_node) {
    SharedLink link{concat("node ", first / ranks_per_node), {}, latency, bytes_per_second};
    for (int from = first; from < std::min(ranks, first + ranks_per_node); ++from) {
      for (int to = 0; to < ranks; ++to) {
        if (to / ranks_per_node != first / ranks_per_node) link.between.emplace_back(from, to);
      }
    }
    links.push_back(std::move(link));
  }
  return links;
}

}  // namespace twobp
