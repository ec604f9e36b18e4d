// The costs of a model on a machine, layer by layer. `twobp profile --json` writes them. Everything that
// predicts (partition, simulation, planner) reads them.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "twobp/schedule/simulate/simulate.h"
#include "twobp/schedule/simulate/stage_cost.h"

namespace twobp {

// A tied weight of a layer: what a memory holds once, however many layers use the weight there.
struct TiedBytes {
  double weight = 0;    // value, master and state, where the first use is; none of them is sharded
  double gradient = 0;  // where the second use is, if it is the last one
};

// A kind of layer, measured at each of the cost model's micro-batch sizes.
struct KindCosts {
  double parameters = 0;                  // numbers, for tables
  double parameter_bytes = 0;             // of one layer: values, masters, buffers
  double gradient_bytes = 0;              // also the size of the sums of data parallelism
  double optimizer_bytes = 0;             // state
  double optimizer_seconds = 0;           // per step
  double update_bytes = 0;                // that its update takes and frees
  double sharded_bytes = 0;               // of all these, what optimizer.shard divides among the replicas
  std::map<std::string, TiedBytes> tied;  // by name
  std::vector<LayerCost> at_size;
  // The costs of slices: by CostModel::slice_lengths, by slice, at each size. Empty: not measured in slices.
  std::vector<std::vector<std::vector<LayerCost>>> in_slices;

  double fixed_bytes(int replicas = 1) const {
    return parameter_bytes + gradient_bytes + optimizer_bytes - sharded_bytes * (1 - 1.0 / replicas);
  }
};

struct ModelLayer {
  std::string name;
  std::string kind;
};

struct CostModel {
  std::vector<int> micro_batch_sizes;  // samples, rising
  std::vector<ModelLayer> layers;      // in model order
  int first_trainable = 0;             // earlier layers have no backward
  // The measured ways to cut sequences into slices (Schedule::slices): the positions of each slice. Each way
  // has another number of slices, 2 at least. Whole sequences are always measured.
  std::vector<std::vector<int>> slice_lengths;
  // How unequal the samples of the data are: their costs over the mean, cheapest first, each for an equal
  // part of the samples. Their mean is 1. Empty: all samples cost the same. LayerCost::forward_rise says what
  // that costs.
  std::vector<double> sample_costs;
  std::map<std::string, KindCosts> kinds;
  double link_latency = 0;           // seconds per message
  double link_bytes_per_second = 0;  // 0: no measurable limit
  std::string made_on;               // the machine, for readers
};

// Throws Error with the first fault: no layers or sizes, a kind without costs, a number that is negative
// (except forward_held, p1_held and rises), not finite, or zero where F's seconds are, slices that do not fit
// each other, and costs of samples that fall or whose mean is not 1.
void check_cost_model(const CostModel& model);

// The layers' costs at this micro-batch size. Measured sizes have their measured costs. Between two of them,
// seconds and bytes are interpolated linearly. Below the first and above the last, they are proportional to
// the size. Throws Error for a size under 1.
std::vector<LayerCost> layer_costs_at(const CostModel& model, int micro_batch_size);

// The same for each of `slices` slices, first to last. 1: whole sequences. Throws Error if they were not
// measured, and names the numbers that were.
std::vector<std::vector<LayerCost>> slice_costs_at(const CostModel& model, int micro_batch_size, int slices);

// The seconds of all ops of each layer for a micro-batch, all its slices together. Throws Error as
// slice_costs_at does.
std::vector<double> layer_seconds_at(const CostModel& model, int micro_batch_size, int slices = 1);

// The positions of each of `slices` slices; empty for 1. Throws Error if they were not measured.
std::vector<int> slice_lengths(const CostModel& model, int slices);

// Whether all layers were measured in so many slices. Always for 1.
bool has_slices(const CostModel& model, int slices);

// Where the weights are.
struct WeightPlaces {
  std::vector<int> rank_of_stage;  // empty: each stage has a rank of its own
  int replicas = 1;
  bool one_memory = false;  // the ranks are threads: the one that uses a tied weight first has it for all
};

// The costs of the stages of a split (layers of each stage), with all fields of StageCost, for a micro-batch
// whose samples have the mean cost. With slices, those of each slice and stage, slice by slice, as `simulate`
// takes them. Throws Error if the split does not fit the model's layers, or as slice_costs_at does.
std::vector<StageCost> stage_costs(const CostModel& model, const std::vector<int>& split, int micro_batch_size,
                                   int slices = 1, const WeightPlaces& places = {});

// The cost model's link between every two ranks. Waiting messages are on the sender's account, as in this
// program's transport (in_process.h).
SimulationOptions simulation_options(const CostModel& model);

// Convert a cost model to JSON and back. `origin` names the file in messages. Reading checks everything and
// throws Error that says where the fault is, what it is, and what was expected.
std::string cost_model_to_json(const CostModel& model);
CostModel parse_cost_model(const std::string& json, const std::string& origin);
CostModel read_cost_model(const std::string& path);

// Micro-batches of samples that cost unequally, as a plan expects them.
// The sizes of a batch.
struct BatchShape {
  int replicas = 1;
  int micro_batches = 1;  // of each replica
  int micro_batch_size = 1;
};

// The costs of a typical batch's micro-batches, those of the first replica, over the mean cost. The batch has
// samples from all parts of `sample_costs` (CostModel::sample_costs) alike, in the order of training
// (balanced_order). Empty if `sample_costs` is: all cost the same.
std::vector<double> typical_batch(const std::vector<double>& sample_costs, const BatchShape& shape);

// The effect of recomputation on a cost model: layers keep less and compute it again.
// Whether some layer was measured with recomputation. The effect of other recomputation on it is unknown.
bool computes_again(const CostModel& model);
// The model in which all layers but the first and the last recompute; `mode` is one of recompute_names().
// Kinds that were measured with it ("mlp+both") keep their measurements. For others the costs follow from the
// layer's own. With activations, I becomes F + I. With derivatives, W becomes F + I + W. With both, both
// change. Layers are assumed to keep their input. Slices have only measured costs. Throws Error for an
// unknown mode, and for layers that were measured with recomputation.
CostModel with_recompute(const CostModel& model, std::string_view mode);

}  // namespace twobp
