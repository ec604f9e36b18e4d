#include "twobp/pipeline/rank_executor.h"

#include <algorithm>

#include "twobp/core/check.h"
#include "twobp/core/clock.h"
#include "twobp/core/text.h"

namespace twobp {
namespace {

// What the exception at hand says, without LibTorch's backtrace.
std::string what_is_thrown() {
  try {
    throw;
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an exception of unknown type";
  }
}

}  // namespace

RankExecutor::RankExecutor(int rank, std::vector<std::unique_ptr<Stage>> stages, Transport& transport,
                           MemoryMeter& meter)
    : rank_(rank), stages_(std::move(stages)), transport_(transport), meter_(meter), events_(rank, meter) {
  boundaries_.resize(stages_.size());
  stage_times_.resize(stages_.size());
  for (const auto& stage : stages_) {
    for (int i = 0; i < stage->layer_count(); ++i)
      largest_p2_ = std::max(largest_p2_, stage->cost(i).p2_peak);
  }
}

RankResult RankExecutor::run(const StepInput& input) {
  prepare(input);
  result_.times.begin = now_seconds();
  for (const Instruction& instruction : input.schedule->ranks[rank_]) {
    try {
      execute(instruction);
    } catch (const Aborted&) {
      throw;
    } catch (...) {
      fail("rank ", rank_, ", step ", input.step, ", ", to_string(instruction), ": ", what_is_thrown());
    }
  }
  result_.times.instructions = static_cast<int64_t>(input.schedule->ranks[rank_].size());
  if (input.finish) {
    const double begin = now_seconds();
    events_.open(Event::Kind::kOptimizer, -1, -1, begin);
    result_.times.optimizer = input.finish(rank_);
    const double end = now_seconds();
    events_.close(end);
    result_.times.idle[static_cast<int>(IdleCause::kTail)] += end - begin - result_.times.optimizer;
  }
  result_.times.end = now_seconds();
  result_.times.busy = result_.times.optimizer;
  for (const StageTimes& times : stage_times_) {
    result_.times.busy += times.forward + times.backward_p1 + times.backward_p2;
  }
  input_ = nullptr;
  result_.events = events_.take();
  return std::move(result_);
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
  started_ = false;
  events_.start(input.want_events);
  cap_ = input.cap_per_rank.empty() ? 0 : input.cap_per_rank[rank_];
  local_.assign(schedule.stages, -1);
  for (size_t s = 0; s < stages_.size(); ++s) {
    local_[stages_[s]->index()] = static_cast<int>(s);
    stages_[s]->prepare_micro_batches(schedule.micro_batches);
    const bool concatenates = input.training && input.batching != P2Batching::kLoop;
    if (input.training) {
      stages_[s]->use_slabs(input.batching == P2Batching::kConcat ? input.slab_slots : 0,
                            concatenates && input.batching == P2Batching::kConcatCopy);
    }
    Boundary& boundary = boundaries_[s];
    for (auto* values :
         {&boundary.input, &boundary.output, &boundary.output_gradient, &boundary.input_gradient}) {
      values->resize(schedule.micro_batches);
    }
    stage_times_[s] = {};
  }
}

void RankExecutor::clear() {
  pending_.clear();
  for (auto& stage : stages_) stage->release_saved();
  for (auto& boundary : boundaries_) boundary = {};
}

Context RankExecutor::context_of(int micro_batch) const {
  Context context;
  context.fields = &(*input_->micro_batches)[micro_batch];
  context.seed = input_->seed;
  context.step = input_->step;
  context.micro_batch = micro_batch;
  context.training = input_->training;
  context.loss_scale = input_->loss_scale;
  context.gradient_scale = input_->gradient_scale;
  return context;
}

void RankExecutor::execute(const Instruction& instruction) {
  const int s = local(instruction.stage);
  const int mb = instruction.micro_batch;
  const int end = mb + instruction.count;
  const auto send = [&](int to_stage, Values& values, int i, Direction direction) {
    const int to = input_->schedule->rank_of_stage[to_stage];
    const double begin = events_.now();
    const int64_t bytes = EventLog::bytes_of(values);
    transport_.isend(to, Tag{input_->step, to_stage, i, direction}, std::move(values));
    values.clear();
    events_.message(Event::Kind::kSend, instruction.stage, to_stage, i, bytes, begin);
  };
  switch (instruction.op) {
    case Op::kForward:
      for (int i = mb; i < end; ++i) forward(s, i);
      break;
    case Op::kBackwardP1:
    case Op::kBackward:
      for (int i = mb; i < end; ++i) backward_p1(s, i, instruction.op == Op::kBackward);
      break;
    case Op::kBackwardP2:
      flush_p2(s, mb, end);
      break;
    case Op::kSendForward:
      for (int i = mb; i < end; ++i)
        send(instruction.stage + 1, boundaries_[s].output[i], i, Direction::kForward);
      break;
    case Op::kSendBackward:
      if (!stages_[s]->gives_gradient()) break;
      for (int i = mb; i < end; ++i) {
        send(instruction.stage - 1, boundaries_[s].input_gradient[i], i, Direction::kBackward);
      }
      break;
    case Op::kRecvForward:
    case Op::kRecvBackward:
      receive(instruction);
      break;
  }
}

void RankExecutor::forward(int s, int mb) {
  Stage& stage = *stages_[s];
  Boundary& boundary = boundaries_[s];
  const bool training = input_->training;
  Context context = context_of(mb);
  Values x = std::move(boundary.input[mb]);
  boundary.input[mb].clear();
  if (stage.index() == 0 && !input_->input_field.empty()) x.push_back(context.field(input_->input_field));
  if (training && input_->batching == P2Batching::kConcat) free_slot(s, mb);
  double begin = now_seconds();
  if (!started_) {
    result_.times.idle[static_cast<int>(IdleCause::kStartUp)] += begin - result_.times.begin;
    events_.start_up(begin);
    started_ = true;
  }
  events_.open(Event::Kind::kForward, stage.index(), mb, begin);
  const MemoryMeter::Scope scope(stage.index(), MemoryCategory::kActivations);
  for (int i = 0; i < stage.layer_count(); ++i) {
    if (training && cap_ > 0 && !pending_.empty()) {
      begin += make_room(stage.cost(i).forward_peak, stage.cost(i).forward_held);  // W has its own time
    }
    context.backward = i >= stage.first_backward();
    context.destination = training && i + 1 < stage.layer_count() ? stage.layer(i + 1).input_slab() : nullptr;
    x = stage.layer(i).forward(std::move(x), context, stage.saved(mb, i));
    if (!context.keeps()) stage.saved(mb, i).release();
    transport_.progress();
  }
  const int next = stage.index() + 1;
  if (next == input_->schedule->stages) {
    result_.loss += x[0].item<double>();
    if (x.size() > 1) result_.right = result_.right.value_or(0) + x[1].item<int64_t>();
  } else if (local(next) >= 0) {
    for (const auto& tensor : x) meter_.rebook(tensor, next, MemoryCategory::kActivations);
    boundaries_[local(next)].input[mb] = std::move(x);
  } else {
    boundary.output[mb] = std::move(x);
  }
  const double end = now_seconds();
  stage_times_[s].forward += end - begin;
  ++stage_times_[s].micro_batches;
  events_.close(end);
}

void RankExecutor::backward_p1(int s, int mb, bool fused) {
  Stage& stage = *stages_[s];
  if (stage.first_backward() == stage.layer_count()) return;
  Boundary& boundary = boundaries_[s];
  Context context = context_of(mb);
  Values dy = std::move(boundary.output_gradient[mb]);
  boundary.output_gradient[mb].clear();
  const MemoryMeter::Scope scope(stage.index(), MemoryCategory::kActivations);
  double begin = now_seconds();
  events_.open(Event::Kind::kBackwardP1, stage.index(), mb, begin);
  double p2_seconds = 0;
  int units = 0;
  for (int i = stage.layer_count() - 1; i >= stage.first_backward(); --i) {
    Saved& saved = stage.saved(mb, i);
    if (cap_ > 0 && !pending_.empty()) begin += make_room(stage.cost(i).p1_peak, stage.cost(i).p1_held);
    context.destination = i > stage.first_backward() ? stage.layer(i - 1).gradient_slab() : nullptr;
    dy = stage.layer(i).backward_p1(std::move(dy), context, saved);
    saved.release_p1();
    saved.visit_p2([&](const at::Tensor& t) { meter_.rebook(t, stage.index(), MemoryCategory::kStash); });
    units_.clear();
    stage.layer(i).collect_p2(saved, units_);
    units += static_cast<int>(units_.size());
    const double p2_begin = fused ? now_seconds() : 0;
    if (fused && !units_.empty()) events_.pause(p2_begin);
    for (const P2Unit& unit : units_) {
      PendingP2 pending{unit, s, mb, i, static_cast<int>(&unit - units_.data())};
      if (fused) {
        run_p2({&pending, 1});
      } else {
        pending_.push_back(pending);
      }
    }
    if (fused && !units_.empty()) {
      const double p2_end = now_seconds();
      p2_seconds += p2_end - p2_begin;
      events_.resume(p2_end);
    }
    transport_.progress();
  }
  const int previous = stage.gives_gradient() ? stage.index() - 1 : -1;
  if (previous >= 0 && local(previous) >= 0) {
    for (const auto& tensor : dy) meter_.rebook(tensor, previous, MemoryCategory::kActivations);
    boundaries_[local(previous)].output_gradient[mb] = std::move(dy);
  } else if (previous >= 0) {
    boundary.input_gradient[mb] = std::move(dy);
  }
  const double end = now_seconds();
  stage_times_[s].backward_p1 += end - begin - p2_seconds;
  stage_times_[s].p2_units = units;
  events_.close(end);
}

void RankExecutor::run_p2(std::span<PendingP2> together) {
  const double begin = now_seconds();
  batch_.clear();
  for (const PendingP2& pending : together) batch_.push_back(pending.unit.saved);
  const PendingP2& first = together.front();
  const MemoryMeter::Scope scope(stages_[first.stage]->index(), MemoryCategory::kStash);
  first.unit.layer->backward_p2(batch_);
  for (Saved* saved : batch_) saved->release_p2();
  transport_.progress();
  const double end = now_seconds();
  stage_times_[first.stage].backward_p2 += end - begin;
  if (events_.on()) log_p2(together, begin, end);
}

void RankExecutor::run_oldest_p2() {
  together_.clear();
  if (input_->batching == P2Batching::kLoop) {
    together_.push_back(pending_.front());
    pending_.pop_front();
  } else {
    const Layer* layer = pending_.front().unit.layer;
    std::copy_if(pending_.begin(), pending_.end(), std::back_inserter(together_),
                 [&](const PendingP2& pending) { return pending.unit.layer == layer; });
    std::erase_if(pending_, [&](const PendingP2& pending) { return pending.unit.layer == layer; });
  }
  run_p2(together_);
}

void RankExecutor::flush_p2(int s, int first, int last) {
  const auto due = [&](const PendingP2& pending) {
    return pending.stage == s && pending.micro_batch >= first && pending.micro_batch < last;
  };
  if (input_->batching != P2Batching::kLoop) {
    // Layer by layer, all due micro-batches of a layer at once.
    while (true) {
      const auto oldest = std::find_if(pending_.begin(), pending_.end(), due);
      if (oldest == pending_.end()) return;
      const Layer* layer = oldest->unit.layer;
      const auto same = [&](const PendingP2& pending) { return pending.unit.layer == layer && due(pending); };
      together_.clear();
      std::copy_if(pending_.begin(), pending_.end(), std::back_inserter(together_), same);
      std::erase_if(pending_, same);
      run_p2(together_);
    }
  }
  // Others of the rank's stages may lie in between.
  for (auto it = pending_.begin(); it != pending_.end();) {
    if (!due(*it)) {
      ++it;
      continue;
    }
    PendingP2 pending = *it;
    it = pending_.erase(it);
    run_p2({&pending, 1});
  }
}

void RankExecutor::receive(const Instruction& instruction) {
  const bool forward = instruction.op == Op::kRecvForward;
  const int s = local(instruction.stage);
  if (!forward && stages_[s]->first_backward() == stages_[s]->layer_count()) return;  // none is sent
  const int peer_stage = instruction.stage + (forward ? -1 : 1);
  const int from = input_->schedule->rank_of_stage[peer_stage];
  for (int mb = instruction.micro_batch; mb < instruction.micro_batch + instruction.count; ++mb) {
    const Tag tag{input_->step, instruction.stage, mb, forward ? Direction::kForward : Direction::kBackward};
    Values values;
    bool there = transport_.try_receive(from, tag, values);
    if (input_->schedule->fills()) {
      while (!there && !pending_.empty()) {
        run_oldest_p2();
        there = transport_.try_receive(from, tag, values);
      }
    }
    if (!there) {
      const double begin = now_seconds();
      values = transport_.receive(from, tag, input_->timeout);
      if (started_) idle(pending_.empty() ? IdleCause::kNothing : IdleCause::kMessage, begin, now_seconds());
    }
    const int64_t bytes = EventLog::bytes_of(values);
    // Room is made while it is on its sender's account still.
    while (cap_ > 0 && !pending_.empty() && meter_.held(rank_) + bytes + largest_p2_ > cap_) run_oldest_p2();
    const double arrived = events_.now();
    if (!started_) events_.start_up(arrived);
    for (const auto& tensor : values) meter_.rebook(tensor, instruction.stage, MemoryCategory::kActivations);
    (forward ? boundaries_[s].input : boundaries_[s].output_gradient)[mb] = std::move(values);
    events_.message(Event::Kind::kReceive, instruction.stage, peer_stage, mb, bytes, arrived);
  }
}

double RankExecutor::make_room(int64_t peak, int64_t held) {
  const int64_t bytes = std::max(peak, held + largest_p2_);
  const auto lacks = [&] { return !pending_.empty() && meter_.held(rank_) + bytes > cap_; };
  if (!lacks()) return 0;
  const double begin = now_seconds();
  events_.pause(begin);
  while (lacks()) run_oldest_p2();
  const double end = now_seconds();
  events_.resume(end);
  return end - begin;
}

void RankExecutor::free_slot(int s, int micro_batch) {
  const auto holds_slot = [&](const PendingP2& pending) {
    return pending.stage == s && pending.micro_batch <= micro_batch - input_->slab_slots;
  };
  while (std::any_of(pending_.begin(), pending_.end(), holds_slot)) run_oldest_p2();
}

void RankExecutor::idle(IdleCause cause, double begin, double end) {
  result_.times.idle[static_cast<int>(cause)] += end - begin;
  events_.idle(cause, begin, end);
}

void RankExecutor::log_p2(std::span<PendingP2> together, double begin, double end) {
  const PendingP2& first = together.front();
  Event event;
  event.stage = stages_[first.stage]->index();
  event.micro_batch = first.micro_batch;
  event.count = static_cast<int>(together.size());
  event.layer = first.layer;
  event.unit = first.leaf;
  event.begin = begin;
  event.end = end;
  events_.backward_p2(*first.unit.layer, stages_[first.stage]->layer_name(first.layer), std::move(event));
}

}  // namespace twobp
