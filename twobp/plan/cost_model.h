// What a model costs on a machine, layer by layer: what `twobp profile --json` writes, and what everything
// that predicts (partition, simulation, planner, adviser) reads.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "twobp/schedule/simulate/simulate.h"
#include "twobp/schedule/simulate/stage_cost.h"

namespace twobp {

// One layer, one micro-batch: seconds, and bytes as LayerShare has them.
struct LayerCost {
  LayerShare share;
  double output = 0;          // bytes that leave a stage which ends here
  double input_gradient = 0;  // bytes that leave a stage which begins here

  double seconds() const { return share.forward + share.backward_p1 + share.backward_p2; }
};

// A kind of layer, measured at each of the cost model's micro-batch sizes.
struct KindCosts {
  double parameters = 0;         // numbers, for tables
  double parameter_bytes = 0;    // of one layer: values, masters, buffers
  double gradient_bytes = 0;     // and what data parallelism sums
  double optimizer_bytes = 0;    // state
  double optimizer_seconds = 0;  // per step
  std::vector<LayerCost> at_size;

  double fixed_bytes() const { return parameter_bytes + gradient_bytes + optimizer_bytes; }
};

struct ModelLayer {
  std::string name;
  std::string kind;
};

struct CostModel {
  std::vector<int> micro_batch_sizes;  // samples, rising
  std::vector<ModelLayer> layers;      // in model order
  int first_trainable = 0;             // layers before have no backward
  std::map<std::string, KindCosts> kinds;
  double link_latency = 0;           // seconds per message
  double link_bytes_per_second = 0;  // 0: no limit that could be measured
  std::string made_on;               // the machine, for people
};

// Throws Error with the first thing that is wrong: no layers or sizes, a kind without costs, a number that is
// negative (but for forward_held and p1_held), not finite, or zero where F's seconds are.
void check_cost_model(const CostModel& model);

// The layers' costs at that micro-batch size. Measured sizes are as measured; between two, seconds and bytes
// lie on the straight line through both; below the first and above the last they are in proportion to the
// size. Throws Error for a size under 1.
std::vector<LayerCost> layer_costs_at(const CostModel& model, int micro_batch_size);

// The costs of the stages of a split (layers of each stage), all fields of StageCost. Throws Error when the
// split is none of the model's layers.
std::vector<StageCost> stage_costs(const CostModel& model, const std::vector<int>& split,
                                   int micro_batch_size);

// The cost model's link between every two ranks; messages that wait are the sender's, as in this program's
// transport (in_process.h).
SimulationOptions simulation_options(const CostModel& model);

// JSON, and back. `origin` names the file in messages. Reading checks everything and throws Error with one
// message: where, what, what is expected.
std::string cost_model_to_json(const CostModel& model);
CostModel parse_cost_model(const std::string& json, const std::string& origin);
CostModel read_cost_model(const std::string& path);

}  // namespace twobp
