// Makes the model and the pipeline's settings from the configuration.
#pragma once

#include <string>
#include <vector>

#include "twobp/data/data.h"
#include "twobp/models/model.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/pipeline_shape.h"
#include "twobp/plan/cost_model.h"
#include "twobp/train/config.h"

namespace twobp {

// `precision` is "fp32", "bf16" or "fp16".
at::ScalarType compute_dtype(const std::string& precision);

// The model for training, in train.precision. Layers that match pipeline.recompute recompute. Throws Error if one of
// its rules fits no layer. `experts`: the part of each layer's experts that this replica holds.
ModelSpec build_model(const Config& config, ExpertShare experts = {});

PipelineOptions pipeline_options(const Config& config, const PipelineShape& shape);

// The cost model of a model on this machine.
struct MeasureOptions {
  std::vector<int> micro_batch_sizes;  // samples; empty: the configured one
  std::vector<int> slices;             // numbers of them, beside whole sequences; empty: the configured one
  bool only_what_fits = false;         // drop sizes above the number of samples instead of throwing Error
  double seconds = 1;                  // approximately, for each size and recomputation
  std::vector<std::string> recompute;  // of recompute_names(): measured in addition to none
  std::string machine{};               // its name, for CostModel::made_on
  int device = 0;                      // which of the machine's GPUs, if pipeline.device is one
};

// Measures one layer of each kind on pipeline.device, on typical samples of the configured data (balance.h), as
// training would, its optimizer step, and the link between two ranks of this process, through the host. Slices are cut
// for the smallest size, and the same at the others; of recomputation, only that of activations is measured in slices,
// as only that is trained so. Throws Error for too few samples, for recomputation in addition to a configured one, for
// a model or sequences that cannot be cut into so many slices, and for errors in building the model or opening the
// data.
CostModel measure_costs(const Config& config, const MeasureOptions& options);
// The same for a model and data of the caller's own.
CostModel measure_costs(const Config& config, const ModelSpec& spec, const Dataset& data,
                        const MeasureOptions& options);

}  // namespace twobp
