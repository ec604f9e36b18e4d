#include "twobp/pipeline/pipeline_shape.h"

#include <algorithm>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/nn/layer.h"
#include "twobp/pipeline/rank_threads.h"
#include "twobp/plan/auto_schedule/auto_schedule.h"
#include "twobp/plan/partition/partition.h"
#include "twobp/schedule/named_schedules.h"

namespace twobp {
namespace {

// A schedule in a file has its own shape. The configuration may repeat it or leave it open.
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

// The auto-schedule takes any number of stages on each rank. Two stages form a V.
PipelineShape auto_shape(const PipelineConfig& config) {
  PipelineShape shape{config.ranks, config.stages, {}, config.micro_batches};
  if (shape.ranks == 0) shape.ranks = shape.stages > 0 ? shape.stages : 2;
  if (shape.stages == 0) shape.stages = shape.ranks;
  const auto placements = possible_placements(shape.stages, shape.ranks);
  TWOBP_CHECK(!placements.empty(), "pipeline.stages is ", shape.stages, " and pipeline.ranks is ", shape.ranks,
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
    TWOBP_CHECK(shape.stages % usual == 0, "pipeline.stages is ", shape.stages, ", but schedule '", config.schedule,
                "' places ", usual, " on each rank: use a multiple of ", usual, ", or set pipeline.ranks");
    shape.ranks = shape.stages > 0 ? shape.stages / usual : 2;
  }
  if (shape.stages == 0) shape.stages = usual * shape.ranks;
  shape.rank_of_stage = place_stages(placement, shape.stages, shape.ranks);
  if (shape.micro_batches == 0) {
    shape.micro_batches = default_micro_batches(config.schedule, shape.stages, shape.ranks);
  }
  return shape;
}

namespace {

constexpr double kSlack = 0.02;

// Value, gradient (of shared experts, a part for each replica) and AdamW's two moments. The optimizer is not known
// here, and AdamW keeps the most.
double weight_bytes(const LayerSpec& spec) {
  const auto layer = spec.make();  // allocates nothing
  double bytes = 0;
  for (const Parameter* parameter : parameters_of(*layer)) {
    const int copies = parameter->trainable() ? 3 + parameter->share().of : 1;
    bytes += static_cast<double>(copies * parameter->numel() * static_cast<int64_t>(sizeof(float)));
  }
  return bytes;
}

}  // namespace

std::vector<int> measured_split(const ModelSpec& model, const std::vector<LayerCost>& costs,
                                const std::vector<int>& rank_of_stage) {
  std::vector<double> seconds;
  for (const LayerCost& cost : costs) seconds.push_back(cost.seconds());
  const int stages = static_cast<int>(rank_of_stage.size());
  if (*std::max_element(rank_of_stage.begin(), rank_of_stage.end()) + 1 < stages)
    return balanced_split(seconds, rank_of_stage);
  PartitionBytes bytes;
  for (size_t l = 0; l < costs.size(); ++l) {
    bytes.fixed.push_back(weight_bytes(model.layers[l]));
    bytes.held.push_back(std::max(0.0, costs[l].forward_held));
  }
  for (int s = 0; s < stages; ++s) bytes.in_flight.push_back(stages - s);
  return balanced_light_split(seconds, bytes, kSlack);
}

std::vector<std::vector<LayerCost>> layer_costs_of_stages(const ModelSpec& model, const std::vector<Profile>& slices,
                                                          const std::vector<int>& split) {
  std::vector<std::vector<LayerCost>> stages;
  for (const Profile& slice : slices) {
    const std::vector<LayerCost> layers = layer_costs(model, slice);
    for (auto first = layers.begin(); const int count : split) {
      stages.emplace_back(first, first + count);
      first += count;
    }
  }
  return stages;
}

StartOptions start_options(const PipelineConfig& config) {
  const PipelineShape shape = pipeline_shape(config);
  return {.transport = config.transport,
          .device = config.device,
          .sums = config.sums,
          .graphs = config.graphs,
          .gpu_parts = config.gpu_parts,
          .data_parallel = config.data_parallel,
          .ranks = shape.ranks,
          .rank_of_stage = shape.rank_of_stage,
          .timeout = config.timeout,
          .spin_seconds = RankThreads::spin_seconds(config.data_parallel * shape.ranks, config.threads)};
}

}  // namespace twobp
