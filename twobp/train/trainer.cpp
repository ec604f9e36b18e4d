#include "twobp/train/trainer.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "twobp/core/check.h"
#include "twobp/core/clock.h"
#include "twobp/train/architecture.h"
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
  ModelSpec model = build_model(config.model, compute_dtype(config.train.precision));
  // Before anything is allocated, and before minutes go into the data.
  if (!config.model.from.empty()) check_weights(model, weights_of(config.model));
  return model;
}

}  // namespace

Trainer::Trainer(const Config& config)
    : Trainer(config, model_of(config), open_data(config.data, config.model, config.train.seed)) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (!config.model.from.empty()) new_parameters_ = load_weights(*pipeline_, weights_of(config.model));
  if (!config.model.adapter.empty()) load_adapter(config.model.adapter, config.model, weights());
}

Trainer::Trainer(const Config& config, const ModelSpec& model, DataSplit data)
    : config_(config), micro_batches_(twobp::micro_batches(config.pipeline)), data_(std::move(data)) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  TWOBP_CHECK(data_.train, "a trainer needs data to train on");
  if (config.train.precision == "fp16") gradient_scale_ = config.train.loss_scale;
  at::set_num_threads(config.pipeline.threads);
  const int64_t size = std::min(config.pipeline.micro_batch_size, data_.train->size());
  std::vector<int64_t> first(size);
  std::iota(first.begin(), first.end(), 0);
  const Profile profile = measure_profile(model, data_.train->read(first, 0));
  pipeline_ = std::make_unique<Pipeline>(model, profile, pipeline_options(config));
  update_ =
      std::make_unique<Update>(*pipeline_, config.optimizer, config.train.clip_norm, config.pipeline.timeout);
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

Variant Trainer::variant() const {
  return {config_.pipeline.schedule, parse_policy(config_.pipeline.p2),
          parse_batching(config_.pipeline.p2_batching), parse_memory_cap(config_.pipeline.memory_cap)};
}

const Plan& Trainer::plan_for(const Variant& variant, int micro_batches) {
  const std::string key =
      concat(variant.schedule, '|', policy_name(variant.policy), '|', batching_name(variant.batching), '|',
             variant.memory_cap, '|', micro_batches);
  const auto found = plans_.find(key);
  if (found != plans_.end()) return found->second;
  return plans_[key] = pipeline_->plan(variant.schedule, micro_batches, variant.policy, variant.batching,
                                       variant.memory_cap);
}

StepResult Trainer::step() {
  const double begin = now_seconds();
  const Batch batch = loader_->next();
  ++batches_;
  const double waited = now_seconds() - begin;
  StepResult result = step(batch, variant());
  result.input_wait = waited;
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
