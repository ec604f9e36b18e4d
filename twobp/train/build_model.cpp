#include "twobp/train/build_model.h"

#include "twobp/core/check.h"
#include "twobp/models/recompute/recompute_rules.h"
#include "twobp/train/trainer.h"
#include "twobp/transport/start.h"

namespace twobp {

at::ScalarType compute_dtype(const std::string& precision) {
  if (precision == "bf16") return at::kBFloat16;
  if (precision == "fp16") return at::kHalf;
  TWOBP_CHECK(precision == "fp32", "unknown precision '", precision, "'");
  return at::kFloat;
}

ModelSpec build_model(const Config& config, ExpertShare experts) {
  ModelSpec model = build_model(config.model, compute_dtype(config.train.precision), experts);
  try {
    std::vector<RecomputeRule> rules;
    for (const std::string& rule : config.pipeline.recompute) rules.push_back(parse_recompute_rule(rule));
    recompute(model, modes_by_layer(model, rules, config.pipeline.split));
  } catch (const Error& error) {
    fail("pipeline.recompute: ", error.what(), ".");
  }
  return model;
}

PipelineOptions pipeline_options(const Config& config, const PipelineShape& shape) {
  PipelineOptions options;
  options.stages = shape.stages;
  options.rank_of_stage = shape.rank_of_stage;
  options.split = config.pipeline.split;
  options.threads.threads_per_rank = config.pipeline.threads;
  options.threads.pin = config.pipeline.pin;
  options.seed = config.train.seed;
  options.timeout = config.pipeline.timeout;
  options.graphs = config.pipeline.graphs;
  options.experts = config.pipeline.experts;
  return options;
}

void run_world(const PipelineConfig& config, const std::function<void(World)>& program) {
  run_world(start_options(config), find_launcher(), program);
}

}  // namespace twobp
