// A rank's step, from its first instruction to the update after its last one.
#include <algorithm>
#include <thread>

#include "twobp/core/check.h"
#include "twobp/core/clock.h"
#include "twobp/core/figures.h"
#include "twobp/core/text.h"
#include "twobp/nn/thrown.h"
#include "twobp/pipeline/early_end.h"
#include "twobp/pipeline/executor/rank_executor.h"
#include "twobp/pipeline/memory/block_cache.h"

namespace twobp {
namespace {

template <typename Visit>
void visit_parameters(const std::vector<std::unique_ptr<Stage>>& stages, const Visit& visit) {
  for (const auto& stage : stages) {
    for (int i = 0; i < stage->layer_count(); ++i) {
      for (Parameter* parameter : stage->parameters(i)) visit(*parameter);
    }
  }
}

}  // namespace

RankResult RankExecutor::run(const StepInput& input) {
  losses_.clear();
  prepare(input);
  if (input.early_end && input.training) keep_buffers();
  const auto& instructions = input.schedule->ranks[rank_];
  if (input.settle) {
    // Not the F of the last stage: the loss multiplies its gradient by the scale already in F.
    const size_t leading = input.leading->end[rank_];
    run_until(leading);
    if (!settle()) run_until(leading);
  }
  run_until(instructions.size());
  const bool whole =
      !input.early_end || (input.training ? input.early_end->completes() : !input.early_end->given_up());
  if (!whole) {
    clear();
    if (input.training) put_back();
  }
  return end(input, whole);
}

void RankExecutor::keep_buffers() {
  const MemoryMeter::Scope scope(stages_.front()->index(), MemoryCategory::kParameters);
  size_t i = 0;
  visit_parameters(stages_, [&](const Parameter& parameter) {
    if (!parameter.is_buffer()) return;
    if (i == buffers_.size()) buffers_.push_back(at::empty_like(parameter.value));
    buffers_[i++].copy_(parameter.value);
  });
}

void RankExecutor::put_back() {
  size_t i = 0;
  visit_parameters(stages_, [&](Parameter& parameter) {
    parameter.forget_grad();
    if (parameter.is_buffer()) parameter.value.copy_(buffers_[i++]);
  });
}

DeviceEvent RankExecutor::record(const StepInput& input, const DeviceEvent& begin) {
  expect_no_gradients();
  losses_.clear();
  prepare(input);
  {
    std::unique_lock turn(*input.turn);
    turn_ = &turn;
    device_.compute().wait(begin);
    run_until(input.schedule->ranks[rank_].size());
  }
  turn_ = nullptr;
  input_ = nullptr;
  recorded_losses_ = std::exchange(losses_, {});
  recorded_grads_.clear();
  visit_parameters(stages_, [&](Parameter& parameter) {
    if (!parameter.has_grad()) return;
    recorded_grads_.push_back(&parameter);
    parameter.forget_grad();  // until the graph has written it
  });
  return device_.compute().record();
}

void RankExecutor::expect_no_gradients() const {
  visit_parameters(stages_, [](const Parameter& parameter) {
    TWOBP_CHECK(!parameter.has_grad(), "pipeline.graphs is set, but ", parameter.name(),
                " already has a gradient, which a recorded step would overwrite: clear it before the step");
  });
}

RankResult RankExecutor::finish_recorded(const StepInput& input, const DeviceEvent& end) {
  expect_no_gradients();
  device_.compute().wait(end);
  prepare(input);
  losses_ = recorded_losses_;
  for (Parameter* parameter : recorded_grads_) parameter->has_grad_from_elsewhere();
  RankResult result = this->end(input);
  result.times.busy = kUnknown;
  result.times.idle.fill(kUnknown);
  for (StageTimes& times : result.stages) times.forward = times.backward_p1 = times.backward_p2 = kUnknown;
  return result;
}

RankResult RankExecutor::end(const StepInput& input, bool whole) {
  const auto& instructions = input.schedule->ranks[rank_];
  const DeviceStream& compute = device_.compute();
  while (!compute.idle()) {  // messages and sums go on meanwhile
    progress();
    std::this_thread::sleep_for(kPause);
  }
  if (!losses_.empty()) {
    const at::Tensor losses = at::stack(losses_).cpu();  // the host waits once
    for (int64_t i = 0; i < losses.numel(); ++i) result_.loss += losses[i].item<double>();
  }
  losses_.clear();
  documents_.clear();
  result_.times.instructions = static_cast<int64_t>(instructions.size());
  // An evaluation leaves nothing on the books of the next step.
  if (!input.training) transport_.flush(input.timeout);
  compute.wait_on_host();  // the update is timed separately
  transport_.progress();   // what was sent is there now
  if (device_times_.any()) {
    const DeviceTimes::Totals device = device_times_.take(stage_times_);
    result_.times.busy = device.busy;
    result_.times.idle = device.idle;
  }
  if (input.training && whole && reducer_ == nullptr && input.schedule->has_backward()) {
    for (size_t s = 0; s < stages_.size(); ++s) {
      for (int i = stages_[s]->first_backward(); i < stages_[s]->layer_count(); ++i)
        expect_gradients(static_cast<int>(s), i);
    }
  }
  if (input.finish && whole) {
    const double begin = now_seconds();
    events_.open(Event::Kind::kOptimizer, -1, -1, begin);
    in_update(input.step, [&] { result_.times.optimizer = input.finish(rank_); });
    const double put_in = now_seconds();
    compute.wait_on_host();  // other ranks read what the update wrote
    const double end = now_seconds();
    result_.times.optimizer += end - put_in;
    events_.close(end);
    result_.times.idle[static_cast<int>(IdleCause::kTail)] += end - begin - result_.times.optimizer;
  }
  result_.times.end = now_seconds();
  result_.times.products = product_time() - products_;
  // A device runs products later: their seconds would be those of launching them.
  if (device_.asynchronous()) result_.times.products.seconds = 0;
  result_.times.allocations = BlockCache::allocations() - allocations_;
  result_.times.busy += result_.times.optimizer;
  if (!device_.asynchronous()) {
    for (const StageTimes& times : stage_times_)
      result_.times.busy += times.forward + times.backward_p1 + times.backward_p2;
  }
  input_ = nullptr;
  result_.events = events_.take();
  result_.stages = stage_times_;
  for (const auto& stage : stages_) result_.stage_memory.push_back(meter_.stage_use(stage->index()));
  result_.memory = meter_.rank_use(rank_);
  return std::move(result_);
}

void RankExecutor::in_update(int64_t step, const std::function<void()>& body) const {
  try {
    body();
  } catch (const Aborted&) {
    throw;
  } catch (...) {
    fail("rank ", rank_, ", step ", step, ", update: ", message_of_thrown());
  }
}

std::string RankExecutor::place_of(int s, int layer) const {
  return concat("stage ", stages_[s]->index(), ", layer ", stages_[s]->layer_name(layer));
}

void RankExecutor::expect_gradients(int s, int layer) const {
  for (const Parameter* parameter : stages_[s]->parameters(layer)) {
    TWOBP_CHECK(
        !parameter->trainable() || parameter->has_grad(), "rank ", rank_, ", ", step_name(), ": ",
        place_of(s, layer), ": parameter ", parameter->name(),
        " got no gradient, so it would never be trained: add one in backward_p1, or in backward_p2 with "
        "a unit from collect_p2, or freeze the parameter");
  }
}

bool RankExecutor::skips() const {
  return input_->early_end && input_->early_end->skips();
}

std::string RankExecutor::step_name() const {
  return input_->training ? concat("step ", input_->step)
                          : concat("batch ", input_->step, " of an evaluation");
}

void RankExecutor::run_until(size_t end) {
  for (; at_ < end; ++at_) {
    const Instruction& instruction = input_->schedule->ranks[rank_][at_];
    try {
      if (at_ == tail_.begin && input_->p2_order == P2Order::kBucket) run_p2_by_layer(-1, 0);
      execute(instruction);
    } catch (const Aborted&) {
      throw;
    } catch (...) {
      fail("rank ", rank_, ", ", step_name(), ", ", to_string(instruction, input_->schedule->slices), ": ",
           message_of_thrown());
    }
  }
}

bool RankExecutor::settle() {
  const double begin = now_seconds();
  Settled settled;
  in_update(input_->step - 1, [&] { settled = input_->settle(rank_); });
  if (settled.stands) {
    // If the step begins anew, start-up lasts until its first F.
    const bool nothing_to_do = input_->schedule->ranks[rank_].empty();
    if (started_ || nothing_to_do)
      idle(started_ ? IdleCause::kNothing : IdleCause::kStartUp, begin, now_seconds());
  } else {
    clear();
    drop_unreceived();
    device_.compute().wait_on_host();  // on the device, too, work in vain is start-up
    prepare(*input_);
  }
  loss_scale_ = settled.loss_scale;
  return settled.stands;
}

void RankExecutor::drop_unreceived() {
  for (const Instruction& receive : input_->leading->unreceived[rank_]) {
    const int from = input_->schedule->rank_of_stage[receive.stage - 1];
    const MemoryMeter::Scope scope(receive.stage, MemoryCategory::kActivations);
    transport_.receive(from, {input_->step, receive.stage, receive.micro_batch, MessageKind::kForward},
                       input_->timeout);
  }
}

void RankExecutor::waited_in_finish(double begin, double end) {
  events_.pause(begin);
  events_.idle(IdleCause::kTail, begin, end);
  events_.resume(end);
}

void RankExecutor::prepare(const StepInput& input) {
  const Schedule& schedule = *input.schedule;
  input_ = &input;
  result_ = {};
  at_ = 0;
  started_ = false;
  turn_ = nullptr;
  loss_scale_ = input.loss_scale;
  events_.start(input.want_events);
  cap_ = input.cap_per_rank.empty() ? 0 : input.cap_per_rank[rank_];
  local_.assign(schedule.stages, -1);
  for (size_t s = 0; s < stages_.size(); ++s) {
    local_[stages_[s]->index()] = static_cast<int>(s);
    stages_[s]->prepare_micro_batches(schedule.micro_batches, schedule.slices);
    Boundary& boundary = boundaries_[s];
    for (auto* values :
         {&boundary.input, &boundary.output, &boundary.output_gradient, &boundary.input_gradient}) {
      values->resize(schedule.micro_batches);
    }
    stage_times_[s] = {};
  }
  documents_.assign(input.micro_batches->size(), nullptr);
  work_.clear();
  if (reducer_ != nullptr && input.training) {
    reducer_->start();
    for (const auto& stage : stages_) {
      work_.emplace_back(stage->layer_count(), LayerWork{schedule.micro_batches, 0});
    }
  }
  prepare_w();
  products_ = product_time();
  BlockCache::begin_step();
  allocations_ = BlockCache::allocations();
  result_.times.begin = now_seconds();
  device_times_.start(device_, /*on=*/input.turn == nullptr);
}

}  // namespace twobp
