#include "twobp/train/trainer.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "twobp/core/check.h"
#include "twobp/core/clock.h"
#include "twobp/train/architecture.h"
#include "twobp/train/auto_variant.h"
#include "twobp/train/build_model.h"
#include "twobp/train/load_model.h"
#include "twobp/train/lora.h"
#include "twobp/train/lr_schedule.h"

namespace twobp {
namespace {

// fp16: the loss scale is doubled after so many steps without an overflow.
constexpr int64_t kGrowthSteps = 2000;

ModelWeights weights_of(const ModelConfig& model) {
  return ModelWeights(model.from, architecture(model.type).names);
}

ModelSpec model_of(const Config& config) {
  ModelSpec model = build_model(config);
  // Before anything is allocated, and before minutes go into the data.
  if (!config.model.from.empty()) check_weights(model, weights_of(config.model));
  return model;
}

}  // namespace

// A schedule in a file is read here and nowhere else: it may go, or change, while the run goes on.
struct Trainer::Parts {
  explicit Parts(const Config& config)
      : schedule(config.pipeline.schedule),
        shape(pipeline_shape(config.pipeline, schedule)),
        model(model_of(config)),
        data(open_data(config.data, config.model, config.train.seed)) {}
  Parts(const Config& config, const ModelSpec& given, DataSplit split)
      : schedule(config.pipeline.schedule),
        shape(pipeline_shape(config.pipeline, schedule)),
        model(given),
        data(std::move(split)) {}

  ScheduleSource schedule;
  PipelineShape shape;
  ModelSpec model;
  DataSplit data;
};

Trainer::Trainer(const Config& config) : Trainer(config, Parts(config)) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (!config.model.from.empty()) new_parameters_ = load_weights(*pipeline_, weights_of(config.model));
  if (!config.model.adapter.empty()) load_adapter(config.model.adapter, config.model, weights());
}

Trainer::Trainer(const Config& config, const ModelSpec& model, DataSplit data)
    : Trainer(config, Parts(config, model, std::move(data))) {}

Trainer::Trainer(const Config& config, Parts parts)
    : config_(config), micro_batches_(parts.shape.micro_batches), data_(std::move(parts.data)) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  TWOBP_CHECK(data_.train, "a trainer needs data to train on");
  config_.pipeline.micro_batches = micro_batches_;  // what a checkpoint notes, without the schedule's file
  if (config.train.precision == "fp16") gradient_scale_ = config.train.loss_scale;
  at::set_num_threads(config.pipeline.threads);
  const int64_t size = std::min(config.pipeline.micro_batch_size, data_.train->size());
  std::vector<int64_t> first(size);
  std::iota(first.begin(), first.end(), 0);
  const Profile profile = measure_profile(parts.model, data_.train->read(first, 0));
  pipeline_ = std::make_unique<Pipeline>(parts.model, profile, pipeline_options(config, parts.shape));
  update_ =
      std::make_unique<Update>(*pipeline_, config.optimizer, config.train.clip_norm, config.pipeline.timeout);
  variant_ = {parts.schedule, parse_policy(config.pipeline.p2), parse_batching(config.pipeline.p2_batching),
              parse_memory_cap(config.pipeline.memory_cap)};
  if (config.pipeline.schedule == kAutoSchedule)
    variant_ = auto_variant(*pipeline_, micro_batches_, variant_);
  if (config.pipeline.replan > 0 && !reorders(variant_)) {
    replanner_ = std::make_unique<Replanner>(config.pipeline.replan, *pipeline_, micro_batches_, variant_);
  }
  make_loader();
}

void Trainer::make_loader() {
  LoaderOptions options;
  options.shuffle = config_.data.shuffle;
  options.seed = config_.train.seed;
  options.first_batch = batches_;
  options.workers = config_.data.workers;
  loader_ = std::make_unique<Loader>(data_.train, micro_batches_, config_.pipeline.micro_batch_size, options);
}

TrainingPosition Trainer::position() const {
  return {step_, batches_, gradient_scale_, good_steps_};
}

void Trainer::go_on_from(const TrainingPosition& position) {
  step_ = position.step;
  batches_ = position.batches;
  gradient_scale_ = position.gradient_scale;
  good_steps_ = position.good_steps;
  make_loader();
}

Trainer::~Trainer() = default;

const Plan& Trainer::plan_for(const Variant& variant, int micro_batches) {
  std::string peaks;
  for (const int64_t peak : variant.standard_peaks) peaks += concat('|', peak);
  const std::string key =
      concat(variant.schedule, '|', variant.schedule.written(), '|', policy_name(variant.policy), '|',
             batching_name(variant.batching), '|', variant.memory_cap, '|', micro_batches, peaks);
  const auto found = plans_.find(key);
  if (found != plans_.end()) return found->second.plan;
  Plan plan = make_plan(*pipeline_, variant, micro_batches);
  return plans_.emplace(key, KeptPlan{variant.schedule, std::move(plan)}).first->second.plan;
}

StepResult Trainer::step() {
  const double begin = now_seconds();
  const Batch batch = loader_->next();
  ++batches_;
  const double waited = now_seconds() - begin;
  StepResult result = step(batch, variant_);
  result.input_wait = waited;
  if (replanner_) result.replan = replanner_->after_step(result.report, variant_);
  if (result.replan) variant_ = result.replan->variant;
  return result;
}

StepResult Trainer::step(const Batch& batch, const Variant& variant) {
  TWOBP_CHECK(pipeline_->model().first_trainable < static_cast<int>(pipeline_->model().layers.size()),
              "nothing is trained: model.freeze matches every parameter");
  TWOBP_CHECK(batch.targets > 0, "step ", step_ + 1,
              ": the batch has no label that counts (all are -100): check the labels of the data");
  StepResult result;
  result.lr = learning_rate(config_.optimizer, step_, config_.train.steps);
  result.tokens = batch.tokens;
  const Plan& plan = plan_for(variant, static_cast<int>(batch.micro_batches.size()));
  StepOptions options;
  options.seed = config_.train.seed;
  options.step = step_ + 1;  // as users count, for messages
  options.loss_scale = 1.0 / static_cast<double>(batch.targets);
  options.timeout = config_.pipeline.timeout;
  options.want_events = std::any_of(observers_.begin(), observers_.end(),
                                    [&](const auto& o) { return o->wants_events(step_ + 1); });
  options.gradient_scale = gradient_scale_;
  options.finish = [&](int rank) { return update_->run(rank, step_ + 1, result.lr, gradient_scale_); };
  result.report = pipeline_->run(plan, batch.micro_batches, options);
  result.step = ++step_;
  result.loss = result.report.loss;
  result.grad_norm = update_->grad_norm();
  result.skipped = update_->skipped();
  result.gradient_scale = gradient_scale_;
  if (config_.train.precision == "fp16") adapt_gradient_scale(result);
  TWOBP_CHECK(std::isfinite(result.loss), "the loss of step ", result.step,
              " is not finite: lower optimizer.lr, set train.clip_norm, or look at the data");
  for (const auto& observer : observers_) observer->on_step(result.report);
  return result;
}

void Trainer::adapt_gradient_scale(const StepResult& result) {
  if (result.skipped) {
    gradient_scale_ /= 2;
    good_steps_ = 0;
    TWOBP_CHECK(gradient_scale_ >= 1, "step ", result.step,
                ": gradients overflow float16 at any loss scale: lower optimizer.lr or use bf16");
  } else if (++good_steps_ == kGrowthSteps) {
    gradient_scale_ *= 2;
    good_steps_ = 0;
  }
}

std::optional<Evaluation> Trainer::evaluate() {
  if (!data_.held_out || data_.held_out->size() == 0) return std::nullopt;
  LoaderOptions reading;
  reading.workers = config_.data.workers;
  reading.evaluation = true;
  Loader loader(data_.held_out, micro_batches_, config_.pipeline.micro_batch_size, reading);
  const int64_t limit = config_.train.eval_batches;
  const int64_t all = loader.batches_per_epoch();
  double loss = 0;
  std::optional<int64_t> right;
  int64_t targets = 0;
  for (int64_t count = 0; count < (limit == 0 ? all : std::min(limit, all)); ++count) {
    const Batch batch = loader.next();
    StepOptions options;
    options.seed = config_.train.seed;
    options.step = -1 - count;  // messages of an evaluation never meet those of a step
    options.training = false;
    options.timeout = config_.pipeline.timeout;
    const auto micro_batches = static_cast<int>(batch.micro_batches.size());
    const StepReport report =
        pipeline_->run(pipeline_->forward_plan(micro_batches), batch.micro_batches, options);
    loss += report.loss;
    if (report.right) right = right.value_or(0) + *report.right;
    targets += batch.targets;
  }
  TWOBP_CHECK(targets > 0, "the held-out data has no label that counts");
  Evaluation result;
  result.loss = loss / static_cast<double>(targets);
  if (right) result.accuracy = static_cast<double>(*right) / static_cast<double>(targets);
  return result;
}

}  // namespace twobp
