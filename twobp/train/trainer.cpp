#include <algorithm>
#include <cmath>

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "twobp/core/check.h"
#include "twobp/data/balance.h"
#include "twobp/models/model_type.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/profile/profile.h"
#include "twobp/pipeline/profile/slices.h"
#include "twobp/plan/cost_model.h"
#include "twobp/plan/memory/stage_bytes.h"
#include "twobp/train/build_model.h"
#include "twobp/train/check_config.h"
#include "twobp/train/fault_injection.h"
#include "twobp/train/gradients.h"
#include "twobp/train/trainer_state.h"
#include "twobp/train/update/update.h"
#include "twobp/train/variant.h"
#include "twobp/train/weights/weight_files.h"
#include "twobp/transport/collectives.h"
#include "twobp/transport/processes.h"

namespace twobp {
namespace {

// The part of each layer's experts that a replica holds.
ExpertShare share_of(const Config& config, const World& world) {
  return {config.pipeline.experts, world.replica % config.pipeline.experts};
}

ModelSpec model_of(const Config& config) {
  ModelSpec model = build_model(config);
  // Checked before anything is allocated, and before minutes are spent on the data.
  if (!config.model.from.empty()) check_weights(model, config.model.weights());
  return model;
}

P2Policy policy_of(const PipelineConfig& config, const ScheduleSource& schedule) {
  if (config.p2 != "auto") return parse_policy(config.p2);
  if (config.schedule == kAutoSchedule) return P2Policy::kFill;  // the search chooses its own
  return schedule.default_policy();
}

P2Order p2_order_of(const PipelineConfig& config) {
  if (config.p2_order == "auto") return config.data_parallel > 1 ? P2Order::kBucket : P2Order::kOldest;
  return config.p2_order == "bucket" ? P2Order::kBucket : P2Order::kOldest;
}

void check_world(const PipelineConfig& config, const PipelineShape& shape, const World& world) {
  TWOBP_CHECK(world.ranks == shape.ranks && world.replicas == config.data_parallel, "a world of ", world.replicas,
              " x ", world.ranks, " ranks, but pipeline.data_parallel ", config.data_parallel, " x pipeline.ranks ",
              shape.ranks);
  TWOBP_CHECK((config.device == "cpu") == world.devices.empty(), "pipeline.device is \"", config.device,
              "\", but this world's ranks have ", world.devices.empty() ? "no devices" : "devices");
}

// A kernel's first launch may wait for the whole GPU. In a step, it could wait for a transfer whose peer waits for this
// rank, so every process launches the kernels of F, I and W before. The first one does when it measures.
void launch_all_kernels(const ModelSpec& model, const ProfiledBatch& batch, const World& world) {
  if (world.process_count() == 1) return;
  for (const int rank : world.local_ranks()) {
    const bool measures = world.is_first() && rank == world.local_ranks().front();
    if (world.device(rank).asynchronous() && !measures) measure_bytes(model, batch.fields, world.device(rank));
  }
}

// The first process opens the data first. The others then find the files that it makes from text (token
// files).
DataSplit open_in_turn(const Config& config, const World& world) {
  // In seconds. Tokenizing may take long, and if the process dies the wait ends.
  constexpr double kDay = 86400;
  DataSplit data;
  if (world.is_first()) data = open_data(config.data, config.model.input(), config.train.seed);
  at::Tensor opened = at::zeros({1});
  broadcast(*world.processes, opened, 0, kDay);
  if (!world.is_first()) data = open_data(config.data, config.model.input(), config.train.seed);
  return data;
}

}  // namespace

// A schedule in a file is only read here. The file may change or disappear during the run.
struct Trainer::Parts {
  explicit Parts(const Config& config)
      : schedule(config.pipeline.schedule), shape(pipeline_shape(config.pipeline, schedule)) {}

  void use(const Config& config, World given) {
    world.emplace(std::move(given));
    check_world(config.pipeline, shape, *world);
    const Processes processes(*world->processes, config.pipeline.timeout);
    if (processes.count() > 1) check_agreement(processes, facts_of_program(config));
    model = model_of(config);
    if (processes.count() > 1) check_agreement(processes, facts_of_model(model, schedule));
    if (config.pipeline.experts > 1) model = build_model(config, share_of(config, *world));
    data = open_in_turn(config, *world);
    if (processes.count() > 1) check_agreement(processes, facts_of_data(config, data));
  }
  void use(const Config& config, World given, const ModelSpec& given_model, DataSplit split) {
    world.emplace(std::move(given));
    check_world(config.pipeline, shape, *world);
    model = given_model;
    data = std::move(split);
  }
  World own_world(const Config& config) const {
    TWOBP_CHECK(config.pipeline.data_parallel == 1, "pipeline.data_parallel is ", config.pipeline.data_parallel,
                ", but this process has only one pipeline: set it to 1");
    ThreadOptions threads;
    threads.threads_per_rank = config.pipeline.threads;
    const auto devices = Device::open_for(config.pipeline.device, shape.ranks, config.pipeline.gpu_parts);
    return std::move(make_thread_worlds(1, shape.ranks, threads, devices).front());
  }

  ScheduleSource schedule;
  PipelineShape shape;
  std::optional<World> world;
  ModelSpec model;
  DataSplit data;
};

Trainer::Trainer(const Config& config, World world)
    : Trainer(config, [&] {
        Parts parts(config);
        parts.use(config, std::move(world));
        return parts;
      }()) {
  load(config);
}

Trainer::Trainer(const Config& config)
    : Trainer(config, [&] {
        Parts parts(config);
        parts.use(config, parts.own_world(config));
        return parts;
      }()) {
  load(config);
}

Trainer::Trainer(const Config& config, const ModelSpec& model, DataSplit data, World world)
    : Trainer(config, [&] {
        Parts parts(config);
        parts.use(config, std::move(world), model, std::move(data));
        return parts;
      }()) {}

Trainer::Trainer(const Config& config, const ModelSpec& model, DataSplit data)
    : Trainer(config, [&] {
        Parts parts(config);
        parts.use(config, parts.own_world(config), model, std::move(data));
        return parts;
      }()) {}

void Trainer::load(const Config& config) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (config.model.from.empty() && config.model.adapter.empty()) return;
  std::optional<ModelSpec> whole;
  if (config.pipeline.experts > 1) whole = build_model(config);
  update_->with_masters([&] {
    if (!config.model.from.empty()) {
      const ModelWeights from = config.model.weights();
      new_parameters_ = load_weights(*pipeline_, from, whole ? &*whole : nullptr);
      unused_tensors_ = from.without_use();
    }
    if (!config.model.adapter.empty())
      load_adapter(config.model.adapter, config.model, whole ? *whole : pipeline_->model(), weights());
  });
}

Trainer::Trainer(const Config& config, Parts parts)
    : config_(config), micro_batches_(parts.shape.micro_batches), data_(std::move(parts.data)) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  TWOBP_CHECK(data_.train, "a trainer needs data to train on");
  check_experts_of_model(config, parts.model);
  check_whole_batches(config, micro_batches_, data_);
  faults_ = FaultInjection::from_environment();
  if (faults_) {
    faults_->wrap(parts.model);
    faults_->wrap(data_);
  }
  parts.model.bf16_stash = config.pipeline.stash == "bf16";
  config_.pipeline.micro_batches = micro_batches_;  // recorded by a checkpoint, without the schedule's file
  loss_scale_ = std::make_unique<LossScale>();
  if (config.train.precision == "fp16") *loss_scale_ = {true, config.train.loss_scale, 0};
  run_ahead_ = std::make_unique<RunAhead>();
  // On this thread, too: it replays recorded steps, whose sums depend on the number of threads.
  at::set_num_threads(config.pipeline.threads);
  variant_ = std::make_unique<Variant>(Variant{parts.schedule, policy_of(config.pipeline, parts.schedule),
                                               parse_batching(config.pipeline.p2_batching),
                                               parse_memory_cap(config.pipeline.memory_cap)});
  PipelineOptions options = pipeline_options(config, parts.shape);
  const ProfiledBatch measured = profiled_batch(*data_.train, config.pipeline.micro_batch_size);
  options.measured = size_of(measured.fields);
  const auto measure = [&] {
    const int rank = parts.world->local_ranks().front();
    StepSeconds step;
    if (config.pipeline.schedule != kAutoSchedule) {  // which is searched for with these slices
      step = [&](const SliceProfiles& slices) {
        return simulated_seconds(parts.model, slices, options, *variant_, micro_batches_);
      };
    }
    return measured_slices(parts.model, measured, config.pipeline, parts.world->device(rank), /*seconds=*/0.3, step);
  };
  launch_all_kernels(parts.model, measured, *parts.world);
  SliceProfiles slices =
      agreed_slices(*parts.world->processes, parts.model, config.pipeline.slices, measure, config.pipeline.timeout);
  const Profile profile = sum_of(slices);
  if (config.pipeline.stages == 0 && config.pipeline.split.empty())
    options = with_frozen_stages(options, parts.model, slices, *variant_, micro_batches_);
  const bool may_stream = config.pipeline.gradients != "kept" && why_gradients_are_kept(config).empty();
  if (may_stream && config.pipeline.schedule == kAutoSchedule && config.pipeline.stages == 0 &&
      config.pipeline.split.empty())
    options = with_v_for_streaming(options, parts.model, slices, micro_batches_);
  if (slices.count() > 1) config_.pipeline.slice_lengths = slices.lengths();  // recorded by a checkpoint
  options.slices = std::move(slices);
  pipeline_ = std::make_unique<Pipeline>(parts.model, profile, options, std::move(*parts.world));
  if (faults_) faults_->choose_layers(*pipeline_);
  update_ = std::make_unique<Update>(*pipeline_, config.optimizer, config.train.clip_norm, config.pipeline.timeout,
                                     parse_bucket(config.pipeline.bucket));
  const std::vector<double> batch =
      typical_batch(relative_costs(*data_.train),
                    {world().replicas, micro_batches_, static_cast<int>(config.pipeline.micro_batch_size)});
  if (config.pipeline.schedule == kAutoSchedule) {
    const MemoryCap cap = variant_->memory_cap;
    // With streamed gradients, another schedule is chosen, which has other needs (decide_gradients).
    if (config.pipeline.gradients == "streamed" && cap.bytes() > 0) variant_->memory_cap = MemoryCap::none();
    *variant_ = auto_variant(*pipeline_, micro_batches_, *variant_, batch);
    variant_->memory_cap = cap;
  }
  // A schedule of forwards alone can evaluate. It is refused only when it is to train.
  const Schedule* written = variant_->schedule.written();
  const bool trains = written == nullptr || written->has_backward();
  gradients_ = std::make_unique<StreamedGradients>();
  if (config.pipeline.gradients != "kept" && trains) {
    *gradients_ = decide_gradients(config_, *pipeline_, *variant_, micro_batches_, batch);
    if (!gradients_->stages.empty()) {
      pipeline_->stream_gradients(gradients_->stages);
      update_->gradients_are_streamed();
    }
  }
  if (config.pipeline.run_ahead != "off" && pipeline_->ranks() > 1 && trains) {
    *run_ahead_ =
        decide_run_ahead(config_, *pipeline_, plan_for(*variant_, micro_batches_), update_->ties_ranks(), batch);
  }
  if (run_ahead_->presumes) update_->make_savepoints(loss_scale_->adapts);
  make_loader();
}

LoaderOptions Trainer::loader_options() const {
  LoaderOptions options;
  options.workers = config_.data.workers;
  options.replicas = world().replicas;
  options.replica = world().replica;
  options.timeout = config_.pipeline.timeout;
  options.count_targets = pipeline_->model().count_targets;
  return options;
}

void Trainer::make_loader() {
  LoaderOptions options = loader_options();
  options.shuffle = config_.data.shuffle;
  options.seed = config_.train.seed;
  options.first_batch = batches_;
  next_.reset();
  loader_ = std::make_unique<Loader>(data_.train, micro_batches_, config_.pipeline.micro_batch_size, options);
}

TrainingPosition Trainer::position() const {
  check_still();
  return {step_, batches_, loss_scale_->value, loss_scale_->good_steps};
}

void Trainer::go_on_from(const TrainingPosition& position) {
  check_still();
  stopping_ = false;
  step_ = position.step;
  batches_ = position.batches;
  loss_scale_->value = position.loss_scale;
  loss_scale_->good_steps = position.good_steps;
  make_loader();
}

void Trainer::add_observer(std::shared_ptr<Observer> observer) {
  if (observer->wants_gradients()) update_->show_gradients_to(observer);
  observers_.push_back(std::move(observer));
}

const World& Trainer::world() const {
  return pipeline_->world();
}

const std::vector<Parameter*>& Trainer::weights() const {
  return update_->weights();
}

Trainer::~Trainer() {
  if (pipeline_) pipeline_->drain();  // the last steps use members that are destroyed first
}

const StepPlan& Trainer::plan_for(const Variant& variant, int micro_batches) {
  const auto found = std::ranges::find_if(
      plans_, [&](const auto& kept) { return kept->micro_batches == micro_batches && kept->variant == variant; });
  if (found != plans_.end()) return (*found)->plan;
  const P2Order order = p2_order_of(config_.pipeline);
  plans_.push_back(std::make_unique<KeptPlan>(
      KeptPlan{variant, micro_batches, make_plan(*pipeline_, variant, micro_batches, order)}));
  return plans_.back()->plan;
}

void Trainer::with_averages(const std::function<void()>& body) {
  check_still();
  update_->swap_averages();
  try {
    body();
  } catch (...) {
    try {
      update_->swap_averages();
    } catch (const std::exception&) {  // the first error is the one to report
    }
    throw;
  }
  update_->swap_averages();
}

std::optional<Evaluation> Trainer::evaluate() {
  std::optional<Evaluation> result;
  with_averages([&] { result = evaluate_held_out(); });
  return result;
}

std::optional<BatchEvaluation> Trainer::evaluate(const Batch& batch, int64_t number, std::vector<Values>* predictions) {
  check_still();
  StepRequest request;
  request.seed = config_.train.seed;
  request.step = number;
  request.training = false;
  request.predictions = predictions;
  request.first_micro_batch = int64_t{world().replica} * micro_batches_;
  if (stop_) request.early_end = std::make_shared<EarlyEnd>(stop_, stops_alone());
  const auto micro_batches = static_cast<int>(batch.micro_batches.size());
  if (predictions != nullptr) predictions->assign(batch.micro_batches.size(), {});
  const StepReport report = pipeline_->run(pipeline_->forward_plan(micro_batches), batch.micro_batches, request);
  if (report.stop || report.given_up) {
    stopping_ = true;
    return std::nullopt;
  }
  return BatchEvaluation{report.loss, report.right};
}

std::optional<Evaluation> Trainer::evaluate_held_out() {
  if (!data_.held_out || data_.held_out->size() == 0) return std::nullopt;
  LoaderOptions reading = loader_options();
  reading.evaluation = true;
  Loader loader(data_.held_out, micro_batches_, config_.pipeline.micro_batch_size, reading);
  const int64_t limit = config_.train.eval_batches;
  const int64_t all = loader.batches_per_epoch();
  double loss = 0;
  std::optional<int64_t> right;
  int64_t targets = 0;
  for (int64_t count = 0; count < (limit == 0 ? all : std::min(limit, all)); ++count) {
    if (stops_alone() && !loader.wait(stop_)) {
      stopping_ = true;
      return std::nullopt;
    }
    const Batch batch = loader.next();
    const std::optional<BatchEvaluation> one = evaluate(batch, count + 1);
    if (!one) return std::nullopt;
    loss += one->loss;
    if (one->right) right = right.value_or(0) + *one->right;
    targets += batch.targets;
  }
  int64_t tokens = 0;
  count_replicas(targets, tokens);
  TWOBP_CHECK(targets > 0,
              "the held-out data has no label that counts (all are -100): check its labels, raise "
              "train.eval_batches, or set data.held_out to 0");
  Evaluation result;
  result.loss = loss / static_cast<double>(targets);
  TWOBP_CHECK(std::isfinite(result.loss) || step_ > 0,
              "the held-out loss of the untrained model is not finite: look at its weights and at the data, or "
              "set train.precision to fp32");
  TWOBP_CHECK(std::isfinite(result.loss), "the held-out loss after step ", step_,
              " is not finite: ", advice_if_not_finite(*pipeline_));
  if (right) result.accuracy = static_cast<double>(*right) / static_cast<double>(targets);
  return result;
}

}  // namespace twobp
