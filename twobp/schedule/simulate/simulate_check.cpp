#include <algorithm>
#include <cmath>
#include <string>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/schedule/simulate/simulator.h"

namespace twobp {
namespace {

void check_cost(double value, const char* what, const std::string& of) {
  TWOBP_CHECK(value >= 0 && value <= kMostCost, "cost of ", of, ": ", what, " is ", value, ", must be from 0 to ",
              kMostCost);
}

void check_change(double value, const char* what, const std::string& of) {
  TWOBP_CHECK(std::abs(value) <= kMostCost, "cost of ", of, ": ", what, " is ", value, ", must be from ", -kMostCost,
              " to ", kMostCost);
}

void check_layer(const LayerCost& layer, const std::string& of) {
  check_cost(layer.forward, "forward", of);
  check_cost(layer.backward_p1, "backward_p1", of);
  check_cost(layer.backward_p2, "backward_p2", of);
  check_cost(layer.forward_peak, "forward_peak", of);
  check_change(layer.forward_held, "forward_held", of);
  check_cost(layer.p1_peak, "p1_peak", of);
  check_change(layer.p1_held, "p1_held", of);
  check_cost(layer.stash, "stash", of);
  check_cost(layer.p2_peak, "p2_peak", of);
  check_cost(layer.gradient_bytes, "gradient_bytes", of);
  check_cost(layer.expert_gradient, "expert_gradient", of);
  check_cost(layer.tied_gradient, "tied_gradient", of);
  check_cost(layer.p1_gradient, "p1_gradient", of);
  check_cost(layer.streamed_gradient, "streamed_gradient", of);
  check_cost(layer.streamed_unit, "streamed_unit", of);
  check_cost(layer.streamed_stash, "streamed_stash", of);
  check_cost(layer.forward_to_experts, "forward_to_experts", of);
  check_cost(layer.forward_from_experts, "forward_from_experts", of);
  check_cost(layer.p1_to_experts, "p1_to_experts", of);
  check_cost(layer.p1_from_experts, "p1_from_experts", of);
  check_cost(layer.beside_experts, "beside_experts", of);
  TWOBP_CHECK(layer.p2_units >= 0, "cost of ", of, ": p2_units is ", layer.p2_units, ", must not be negative");
  TWOBP_CHECK(layer.p2_units > 0 || layer.stash == 0, "cost of ", of, ": stash is ", layer.stash,
              ", but there is no W to free it (p2_units is 0)");
}

}  // namespace

void check_stage_cost(const StageCost& cost, int stage) {
  const std::string of = concat("stage ", stage);
  check_cost(cost.forward, "forward", of);
  check_cost(cost.backward_p1, "backward_p1", of);
  check_cost(cost.backward_p2, "backward_p2", of);
  check_cost(cost.optimizer, "optimizer", of);
  check_cost(cost.output_bytes, "output_bytes", of);
  check_cost(cost.input_gradient_bytes, "input_gradient_bytes", of);
  check_cost(cost.gradient_bytes, "gradient_bytes", of);
  check_cost(cost.fixed_bytes, "fixed_bytes", of);
  check_cost(cost.update_bytes, "update_bytes", of);
  if (cost.layers.empty()) {  // else the layers determine these
    check_cost(cost.activation_bytes, "activation_bytes", of);
    check_cost(cost.stash_bytes, "stash_bytes", of);
    TWOBP_CHECK(cost.p2_units >= 1, "cost of stage ", stage, ": p2_units is ", cost.p2_units, ", must be at least 1");
  }
  int units = 0;
  for (size_t i = 0; i < cost.layers.size(); ++i) {
    check_layer(cost.layers[i], concat("layer ", i, " of stage ", stage));
    units += cost.layers[i].p2_units;
  }
  TWOBP_CHECK(cost.layers.empty() || units > 0 || cost.backward_p2 == 0, "cost of stage ", stage, ": backward_p2 is ",
              cost.backward_p2, ", but none of its layers has a W (p2_units is 0)");
}

void check_simulation_inputs(const Schedule& schedule, const std::vector<StageCost>& costs,
                             const SimulationOptions& options) {
  const auto stages = static_cast<size_t>(schedule.stages);
  const size_t rows = stages > 0 ? costs.size() / stages : 0;
  TWOBP_CHECK(
      rows > 0 && costs.size() == rows * stages && schedule.micro_batches % static_cast<int>(rows) == 0, "simulating '",
      schedule.name, "' needs ", stages, " costs, one for each stage, or rows of them: one for each of the ",
      schedule.micro_batches, schedule.slices > 1 ? " slices of all micro-batches" : " micro-batches",
      ", or fewer, which repeat (then their number must divide ", schedule.micro_batches, "); got ",
      costs.size() == rows * stages ? concat(rows, rows == 1 ? " row" : " rows") : concat(costs.size(), " costs"));
  for (size_t i = 0; i < costs.size(); ++i) {
    const StageCost& first = costs[i % stages];
    check_stage_cost(costs[i], static_cast<int>(i % stages));
    bool alike =
        costs[i].layers.size() == first.layers.size() && (!first.layers.empty() || costs[i].p2_units == first.p2_units);
    for (size_t layer = 0; alike && layer < first.layers.size(); ++layer) {
      alike = costs[i].layers[layer].p2_units == first.layers[layer].p2_units;
    }
    TWOBP_CHECK(alike, "the costs of stage ", i % stages, " have other layers or p2_units in row ", i / stages,
                " than in row 0");
  }
  TWOBP_CHECK(options.streams.empty() || options.streams.size() == stages, "streams has ", options.streams.size(),
              " entries for ", stages, " stages: give one for each stage, or none");
  TWOBP_CHECK(options.cap_per_rank.empty() || static_cast<int>(options.cap_per_rank.size()) == schedule.rank_count(),
              "cap_per_rank has ", options.cap_per_rank.size(), " entries for ", schedule.rank_count(),
              " ranks: give one for each rank, or none");
  for (double cap : options.cap_per_rank) {
    TWOBP_CHECK(std::isfinite(cap) && cap >= 0, "cap_per_rank holds ", cap,
                ", must be finite and not negative (0: no cap)");
  }
  TWOBP_CHECK(options.begin.empty() || static_cast<int>(options.begin.size()) == schedule.rank_count(), "begin has ",
              options.begin.size(), " entries for ", schedule.rank_count(), " ranks: give one for each rank, or none");
  for (double begin : options.begin) {
    TWOBP_CHECK(std::isfinite(begin) && begin >= 0, "begin holds ", begin, ", must be finite and not negative");
  }
  const int most =
      std::min(schedule.micro_batches, schedule.slices == 1 && options.recorded.empty() ? schedule.frozen : 0);
  TWOBP_CHECK(options.ahead >= 0 && options.ahead <= most, "ahead is ", options.ahead, ": must be from 0 to ", most,
              ", the number of micro-batches or of frozen stages, and 0 with slices and with a recorded order");
  TWOBP_CHECK(std::isfinite(options.norm_known), "norm_known is ", options.norm_known, ", must be finite");
  const DataParallel& parallel = options.data_parallel;
  TWOBP_CHECK(parallel.replicas >= 1, "data parallelism needs at least 1 replica, got ", parallel.replicas);
  check_cost(parallel.latency, "latency", "data parallelism");
  check_cost(parallel.bytes_per_second, "bytes_per_second", "data parallelism");
  check_cost(parallel.bucket_bytes, "bucket_bytes", "data parallelism");
  TWOBP_CHECK(parallel.experts >= 1 && parallel.replicas % parallel.experts == 0, parallel.experts,
              " replicas that share experts do not divide ", parallel.replicas, " replicas");
  check_cost(parallel.exchange_latency, "exchange_latency", "data parallelism");
  check_cost(parallel.exchange_bytes_per_second, "exchange_bytes_per_second", "data parallelism");
}

}  // namespace twobp
