#include "twobp/train/model/build_model.h"

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/nn/models/freeze.h"
#include "twobp/nn/models/recompute.h"
#include "twobp/plan/auto_schedule/auto_schedule.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/train/auto_variant.h"
#include "twobp/train/model/architecture.h"

namespace twobp {

at::ScalarType compute_dtype(const std::string& precision) {
  if (precision == "bf16") return at::kBFloat16;
  if (precision == "fp16") return at::kHalf;
  TWOBP_CHECK(precision == "fp32", "unknown precision '", precision, "'");
  return at::kFloat;
}

ModelSpec build_model(const ModelConfig& config, at::ScalarType dtype) {
  ModelSpec model = architecture(config.type).build(config, dtype);
  if (config.lora > 0) {
    check_lora_targets(model, {config.lora, config.lora_alpha, config.lora_targets});
    freeze_all_but_lora(model);
  }
  freeze(model, config.freeze);
  return model;
}

ModelSpec build_model(const Config& config) {
  ModelSpec model = build_model(config.model, compute_dtype(config.train.precision));
  try {
    std::vector<RecomputeRule> rules;
    for (const std::string& rule : config.pipeline.recompute) rules.push_back(parse_recompute_rule(rule));
    recompute(model, recompute_modes(model, rules, config.pipeline.split));
  } catch (const Error& error) {
    fail("pipeline.recompute: ", error.what(), ".");
  }
  return model;
}

namespace {

// Of a schedule in a file, which has its own: the configuration may say the same, or nothing.
PipelineShape written_shape(const PipelineConfig& config, const Schedule& schedule) {
  const auto check = [&](std::string_view key, int given, int own, std::string_view what) {
    TWOBP_CHECK(given == 0 || given == own, "pipeline.", key, " is ", given, ", but ", config.schedule,
                " is a schedule of ", own, " ", what, ": set it to ", own, ", or to 0");
  };
  check("ranks", config.ranks, schedule.rank_count(), "ranks");
  check("stages", config.stages, schedule.stages, "stages");
  check("micro_batches", config.micro_batches, schedule.micro_batches, "micro-batches");
  return {schedule.rank_count(), schedule.stages, schedule.rank_of_stage, schedule.micro_batches};
}

// Of the auto-schedule: any number of stages on each rank, two of them as a V.
PipelineShape auto_shape(const PipelineConfig& config) {
  PipelineShape shape{config.ranks, config.stages, {}, config.micro_batches};
  if (shape.ranks == 0) shape.ranks = shape.stages > 0 ? shape.stages : 2;
  if (shape.stages == 0) shape.stages = shape.ranks;
  const auto placements = possible_placements(shape.stages, shape.ranks);
  TWOBP_CHECK(!placements.empty(), "pipeline.stages is ", shape.stages, " and pipeline.ranks is ",
              shape.ranks,
              ": schedule 'auto' places the same number of stages on each rank, so use a multiple of it");
  shape.rank_of_stage = place_stages(placements[0], shape.stages, shape.ranks);
  if (shape.micro_batches == 0) shape.micro_batches = 2 * shape.ranks;
  return shape;
}

}  // namespace

PipelineShape pipeline_shape(const PipelineConfig& config) {
  return pipeline_shape(config, ScheduleSource(config.schedule));
}

PipelineShape pipeline_shape(const PipelineConfig& config, const ScheduleSource& schedule) {
  if (schedule.written() != nullptr) return written_shape(config, *schedule.written());
  if (config.schedule == kAutoSchedule) return auto_shape(config);
  const Placement placement = named_schedule(config.schedule).placement;
  const int usual = usual_stages_per_rank(placement);
  PipelineShape shape{config.ranks, config.stages, {}, config.micro_batches};
  if (shape.ranks == 0) {
    TWOBP_CHECK(shape.stages % usual == 0, "pipeline.stages is ", shape.stages, ", but schedule '",
                config.schedule, "' places ", usual, " on each rank: use a multiple of ", usual,
                ", or set pipeline.ranks");
    shape.ranks = shape.stages > 0 ? shape.stages / usual : 2;
  }
  if (shape.stages == 0) shape.stages = usual * shape.ranks;
  shape.rank_of_stage = place_stages(placement, shape.stages, shape.ranks);
  if (shape.micro_batches == 0) {
    shape.micro_batches = default_micro_batches(config.schedule, shape.stages, shape.ranks);
  }
  return shape;
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
  return options;
}

int micro_batches(const PipelineConfig& config) {
  return pipeline_shape(config).micro_batches;
}

}  // namespace twobp
