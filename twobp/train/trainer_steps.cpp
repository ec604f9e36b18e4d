// The trainer's steps: beginning them, up to two at once, and ending them.
#include <algorithm>
#include <cmath>

#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/train/fault_injection.h"
#include "twobp/train/trainer_state.h"
#include "twobp/train/update/rates.h"
#include "twobp/train/update/update.h"
#include "twobp/transport/collectives.h"

namespace twobp {
namespace {

constexpr int64_t kMostNamed = 10;  // batches, and samples of one

std::string list_of(const std::vector<int64_t>& order, int64_t begin, int64_t end) {
  std::string out;
  for (int64_t i = begin; i < std::min(end, begin + kMostNamed); ++i)
    out += concat(i == begin ? "" : ", ", order[static_cast<size_t>(i)]);
  return end - begin > kMostNamed ? concat(out, " and ", end - begin - kMostNamed, " more") : out;
}

}  // namespace

// A step's update, on each rank's thread.
class Trainer::UpdateOfStep : public StepUpdate {
 public:
  UpdateOfStep(Trainer& trainer, StepUnderWay& step) : trainer_(trainer), step_(step) {}

  void apply(int rank, const std::vector<Parameter*>& complete) override {
    trainer_.update_->apply(rank, step_.result.lr, complete);
  }
  std::vector<Waited> run(int rank) override {
    const StepResult& result = step_.result;
    if (trainer_.faults_) trainer_.faults_->in_optimizer(rank, result.step);
    return trainer_.update_->run(rank, result.step, result.lr, step_.update);
  }
  Settled settle(int rank) override { return trainer_.update_->settle(rank); }

 private:
  Trainer& trainer_;
  StepUnderWay& step_;
};

template <typename Body>
StepResult Trainer::or_error(const Body& body) {
  try {
    return body();
  } catch (const Aborted&) {
    // If a rank of this process failed first, its error is the cause.
    const std::exception_ptr error = pipeline_->drain();
    under_way_.clear();
    if (error) std::rethrow_exception(error);
    throw;
  } catch (const std::exception& error) {
    pipeline_->abandon(error.what());
    under_way_.clear();
    throw;
  }
}

StepResult Trainer::step() {
  return or_error([&] {
    if (under_way_.empty() && !begin_next()) {
      stopping_ = true;
      StepResult result;
      result.step = step_;
      result.stop = result.given_up = true;
      return result;
    }
    if (may_run_ahead(next_step())) begin_next();
    return end();
  });
}

StepResult Trainer::step(const Batch& batch, const Variant& variant, std::optional<double> lr,
                         std::vector<Fields> next) {
  check_still();
  auto step = std::make_unique<StepUnderWay>();
  step->batch = batch;
  step->next = std::move(next);
  step->may_give_up = may_give_up(next_step());
  count(*step);
  TWOBP_CHECK(step->targets > 0, "step ", next_step(),
              ": the batch has no label that counts (all are -100): check the labels of the data");
  return or_error([&] {
    begin(std::move(step), variant, lr);
    return end();
  });
}

bool Trainer::may_run_ahead(int64_t step) const {
  return run_ahead_->on && warm_ && !stopping_ && step <= last_ahead_ && !wants_events(step - 1) && !wants_events(step);
}

bool Trainer::wants_events(int64_t step) const {
  return std::any_of(observers_.begin(), observers_.end(), [&](const auto& o) { return o->wants_events(step); });
}

void Trainer::check_still() const {
  TWOBP_CHECK(under_way_.empty(), "step ", step_ + 1, " is under way, because the trainer runs ahead until step ",
              last_ahead_, ": call step() until then");
}

bool Trainer::stops_alone() const {
  return stop_ && world().processes->size() == 1 && world().replicas == 1;
}

bool Trainer::may_give_up(int64_t step) const {
  return stops_alone() && !run_ahead_->on && !config_.pipeline.graphs && !wants_events(step);
}

void Trainer::give_back_batch() {
  --batches_;
  make_loader();
}

bool Trainer::begin_next() {
  const double begin_seconds = now_seconds() - (next_ ? next_->late_by : 0);
  if (faults_) faults_->begin_step(next_step());
  auto step = std::make_unique<StepUnderWay>();
  step->may_give_up = may_give_up(next_step());
  step->from_loader = true;
  if (!read_batch_for(*step)) return false;
  step->result.input_wait = now_seconds() - begin_seconds;
  look_ahead(*step);
  begin(std::move(step), *variant_);
  return true;
}

int Trainer::forwards_ahead() {
  return plan_for(*variant_, micro_batches_).ahead;
}

void Trainer::look_ahead(StepUnderWay& step) {
  if (world().replicas > 1 || next_step() >= config_.train.steps || forwards_ahead() == 0) return;
  try {
    if (!loader_->wait([] { return true; })) return;
    next_ = std::make_unique<NextBatch>(NextBatch{.batch = loader_->next()});
    step.next = next_->batch.micro_batches;
  } catch (const std::exception&) {  // the next step meets it again
  }
}

void Trainer::count_replicas(int64_t& targets, int64_t& tokens) {
  if (world().replicas == 1) return;
  const MemoryMeter::Watch watch(pipeline_->meter());
  at::Tensor counts = at::zeros({2}, at::kLong);
  auto* values = counts.mutable_data_ptr<int64_t>();
  if (world().is_first_of_replica()) {
    values[0] = targets;
    values[1] = tokens;
  }
  sum_on_the_way(*pipeline_->world().processes, counts, config_.pipeline.timeout);
  targets = values[0];
  tokens = values[1];
}

void Trainer::count(StepUnderWay& step) {
  step.targets = step.batch.targets;
  step.result.tokens = step.batch.tokens;
  count_replicas(step.targets, step.result.tokens);
}

bool Trainer::read_batch_for(StepUnderWay& step) {
  const int64_t in_epoch = loader_->batches_per_epoch();
  for (int64_t tried = 0; tried < in_epoch; ++tried) {
    if (step.may_give_up && !next_ && !loader_->wait(stop_)) return false;
    const std::unique_ptr<NextBatch> read = std::move(next_);
    step.batch = read ? std::move(read->batch) : loader_->next();
    const int64_t batch = batches_++;
    if (read && read->counted) {
      step.targets = read->targets;
      step.result.tokens = read->tokens;
    } else {
      count(step);
    }
    if (step.targets > 0) return true;
    if (++left_out_ > kMostNamed) continue;
    const int64_t size = data_.train->size();
    const std::vector<int64_t> order = epoch_order(size, config_.data.shuffle, config_.train.seed, batch / in_epoch);
    const int64_t samples = world().replicas * micro_batches_ * config_.pipeline.micro_batch_size;
    const int64_t begin = batch % in_epoch * samples;
    step.result.warnings.push_back(concat("batch ", batch % in_epoch + 1, " of epoch ", batch / in_epoch + 1,
                                          ", before step ", next_step(),
                                          ", has no label that counts (all are -100), so it is left out: samples ",
                                          list_of(order, begin, std::min(begin + samples, size)),
                                          left_out_ == kMostNamed ? "; further such batches are not named" : ""));
  }
  fail("step ", next_step(), ": no batch of a whole epoch has a label that counts (all are -100): check the ",
       "labels of the data");
}

void Trainer::begin(std::unique_ptr<StepUnderWay> under_way, const Variant& variant, std::optional<double> lr) {
  TWOBP_CHECK(pipeline_->model().first_trainable < static_cast<int>(pipeline_->model().layers.size()),
              "nothing is trained: model.freeze matches every parameter");
  StepUnderWay& step = *under_way;
  StepResult& result = step.result;
  result.step = next_step();
  result.lr = lr.value_or(learning_rate(config_.optimizer, result.step - 1, config_.train.steps));
  const bool early = !under_way_.empty();
  if (!early) update_->use(*loss_scale_);
  step.update = update_->begin(run_ahead_->presumes && may_run_ahead(result.step + 1));
  StepRequest request;
  request.seed = config_.train.seed;
  request.step = result.step;  // counted from 1, for messages
  request.first_micro_batch = int64_t{world().replica} * micro_batches_;
  request.loss = {1.0 / static_cast<double>(step.targets), loss_scale_->value};
  request.want_events = wants_events(result.step);
  request.next = std::move(step.next);
  request.update = std::make_shared<UpdateOfStep>(*this, step);
  if (stop_) request.early_end = std::make_shared<EarlyEnd>(stop_, step.may_give_up);
  const StepPlan& plan = plan_for(variant, static_cast<int>(step.batch.micro_batches.size()));
  pipeline_->submit(plan, step.batch.micro_batches, request);
  under_way_.push_back(std::move(under_way));
}

StepResult Trainer::end() {
  finish(*under_way_.front());
  StepResult result = std::move(under_way_.front()->result);
  const bool from_loader = under_way_.front()->from_loader;
  under_way_.pop_front();
  if (result.given_up && from_loader) give_back_batch();
  result.stop = stopping();
  return result;
}

void Trainer::wait_for_report(StepUnderWay& step) {
  std::vector<at::Tensor> numbers = update_->to_sum(*loss_scale_, step.update);
  if (world().replicas == 1 || !step.from_loader || next_ || next_step() > config_.train.steps) {
    step.result.report = pipeline_->finish(numbers);
    return;
  }
  const at::Tensor counts = at::zeros({3}, at::kDouble);  // targets, tokens, processes without a batch
  auto* values = counts.mutable_data_ptr<double>();
  auto read = std::make_unique<NextBatch>();
  try {
    read->batch = loader_->next();
    if (world().is_first_of_replica()) {
      values[0] = static_cast<double>(read->batch.targets);
      values[1] = static_cast<double>(read->batch.tokens);
    }
  } catch (const std::exception&) {  // begin_next() meets it again: this step is still whole
    values[2] = 1;
    read.reset();
  }
  const double there = now_seconds();
  numbers.push_back(counts);
  step.result.report = pipeline_->finish(numbers);
  if (!read) return;
  read->late_by = std::max(0.0, there - step.result.report.end);
  read->counted = values[2] == 0;
  read->targets = std::llround(values[0]);
  read->tokens = std::llround(values[1]);
  next_ = std::move(read);
}

void Trainer::finish(StepUnderWay& step) {
  StepResult& result = step.result;
  wait_for_report(step);
  if (result.report.given_up) {
    result.given_up = stopping_ = true;
    result.step = step_;
    return;
  }
  if (result.report.begun_early) {  // the ranks worked while the caller waited
    const RankTimes& first = result.report.ranks[world().local_ranks().front()];
    result.input_wait = std::min(result.input_wait, first.idle[static_cast<int>(IdleCause::kStartUp)]);
  }
  if (under_way_.size() == 1) update_->settle_all();
  result.loss_scale = loss_scale_->value;
  update_->finish(result.step, *loss_scale_, step.update);
  result.grad_norm = step.update.grad_norm;
  result.skipped = step.update.skipped;
  result.loss = result.report.loss;
  step_ = result.step;
  warm_ = true;
  stopping_ = stopping_ || result.report.stop;
  loss_scale_->adapt(result.skipped);
  TWOBP_CHECK(!result.skipped || loss_scale_->value >= 1, "step ", result.step,
              ": gradients overflow float16 at any loss scale: lower optimizer.lr or use bf16");
  TWOBP_CHECK(std::isfinite(result.loss), "the loss of step ", result.step,
              " is not finite: ", advice_if_not_finite(*pipeline_));
  for (const auto& observer : observers_) {
    if (world().is_first()) observer->on_step(result.report);
  }
}

}  // namespace twobp
