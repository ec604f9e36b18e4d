#include "twobp/pipeline/executor/rank_executor.h"

#include <algorithm>
#include <thread>

#include <ATen/record_function.h>

#include "twobp/core/awake_clock.h"
#include "twobp/core/check.h"
#include "twobp/core/clock.h"
#include "twobp/core/text.h"
#include "twobp/pipeline/layer_error.h"
#include "twobp/transport/time_out.h"

namespace twobp {

RankExecutor::RankExecutor(int rank, std::vector<std::unique_ptr<Stage>> stages, Transport& transport,
                           MemoryMeter& meter, Device device)
    : rank_(rank),
      device_(std::move(device)),
      stages_(std::move(stages)),
      transport_(transport),
      meter_(meter),
      events_(rank, meter) {
  boundaries_.resize(stages_.size());
  stage_times_.resize(stages_.size());
  for (const auto& stage : stages_) {
    for (int slice = 0; slice < stage->cost_slices(); ++slice) {
      for (int i = 0; i < stage->layer_count(); ++i)
        largest_p2_ = std::max(largest_p2_, static_cast<int64_t>(stage->cost(i, slice).p2_peak));
    }
  }
}

// Tells the reducer when the W of a layer is complete, or will never come.
void RankExecutor::check_done(int s, int layer) {
  const LayerWork& work = work_[s][layer];
  if (work.p1 != 0 || work.p2 != 0) return;
  expect_gradients(s, layer);
  reducer_->layer_done(stages_[s]->index(), layer);
}

void RankExecutor::progress() {
  transport_.progress();
  if (reducer_ != nullptr) reducer_->progress();
}

void RankExecutor::clear() {
  queue_ = {};
  losses_.clear();
  documents_.clear();
  for (auto& stage : stages_) stage->release_saved();
  for (auto& boundary : boundaries_) boundary = {};
}

Context RankExecutor::context_of(int micro_batch) {
  Context context;
  context.fields = &(*input_->micro_batches)[micro_batch];
  context.documents = &documents_[micro_batch];
  context.seed = input_->seed;
  context.step = input_->step;
  const int slices = input_->schedule->slices;
  context.micro_batch = input_->first_micro_batch + micro_batch / slices;
  if (slices > 1) {
    const Cuts& cuts = (*input_->cuts)[micro_batch / slices];
    const int slice = micro_batch % slices;
    context.slice = {&(*input_->sequences)[micro_batch / slices], cuts.back(), cuts[slice + 1] - cuts[slice]};
    context.past = cuts[slice];
  }
  context.training = input_->training;
  context.loss_weight = input_->loss_weight;
  context.loss_scale = loss_scale_;
  return context;
}

void RankExecutor::execute(const Instruction& instruction) {
  const int s = local(instruction.stage);
  const int mb = instruction.micro_batch;
  const int end = mb + instruction.count;
  const auto send = [&](int to_stage, Values& values, int i, MessageKind kind) {
    const int to = input_->schedule->rank_of_stage[to_stage];
    const double begin = events_.now();
    const int64_t bytes = EventLog::bytes_of(values);
    transport_.isend(to, Tag{input_->step, to_stage, i, kind}, std::move(values));
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
      for (int i = mb; i < end; ++i) send(instruction.stage + 1, boundaries_[s].output[i], i, forward_kind());
      break;
    case Op::kSendBackward:
      if (!stages_[s]->gives_gradient()) break;
      for (int i = mb; i < end; ++i) {
        send(instruction.stage - 1, boundaries_[s].input_gradient[i], i, MessageKind::kBackward);
      }
      break;
    case Op::kRecvForward:
    case Op::kRecvBackward:
      receive(instruction);
      break;
  }
}

void RankExecutor::forward(int s, int mb) {
  if (skips()) return;
  RECORD_USER_SCOPE("F");
  Stage& stage = *stages_[s];
  Boundary& boundary = boundaries_[s];
  const bool training = input_->training;
  Context context = context_of(mb);
  Values x = std::move(boundary.input[mb]);
  boundary.input[mb].clear();
  if (stage.index() == 0 && !input_->input_field.empty())
    x.push_back(on_device(context.field(input_->input_field), device_.where()));
  double begin = now_seconds();
  if (!started_) {
    result_.times.idle[static_cast<int>(IdleCause::kStartUp)] += begin - result_.times.begin;
    events_.start_up(begin);
    started_ = true;
  }
  events_.open(Event::Kind::kForward, stage.index(), mb, begin);
  device_times_.open(&StageTimes::forward, s, cause_of_wait());
  const MemoryMeter::Scope scope(stage.index(), MemoryCategory::kActivations);
  for (int i = 0; i < stage.layer_count(); ++i) {
    if (training && cap_ > 0 && !queue_.empty()) {
      begin +=
          make_room(stage.cost(i, mb).forward_peak, stage.cost(i, mb).forward_held);  // W has its own time
    }
    context.backward = i >= stage.first_backward();
    x = naming_layer([&] { return place_of(s, i); },
                     [&] { return stage.layer(i).forward(std::move(x), context, stage.saved(mb, i)); });
    if (!context.keeps()) {
      stage.saved(mb, i).release();
      if (context.sliced() && mb % input_->schedule->slices == input_->schedule->slices - 1)
        stage.forget_slices(mb, i);
    }
    progress();
  }
  device_times_.close();
  const int next = stage.index() + 1;
  if (next == input_->schedule->stages) {
    if (x[0].is_cpu()) {
      result_.loss += x[0].item<double>();
    } else {
      losses_.push_back(std::move(x[0]));
    }
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
  if (stage.first_backward() == stage.layer_count() || skips()) return;
  RECORD_USER_SCOPE("I");
  Boundary& boundary = boundaries_[s];
  Context context = context_of(mb);
  Values dy = std::move(boundary.output_gradient[mb]);
  boundary.output_gradient[mb].clear();
  const MemoryMeter::Scope scope(stage.index(), MemoryCategory::kActivations);
  double begin = now_seconds();
  events_.open(Event::Kind::kBackwardP1, stage.index(), mb, begin);
  device_times_.open(&StageTimes::backward_p1, s, cause_of_wait());
  double p2_seconds = 0;
  int units = 0;
  const bool last = at_ == tail_.last_p1;
  auto& made = made_[s][mb];
  made.clear();
  queue_.begin_p1(stage.index(), mb);
  const auto interrupt = [&](const auto& run_w) {
    const double p2_begin = now_seconds();
    events_.pause(p2_begin);
    device_times_.pause();
    run_w();
    device_times_.resume();
    const double p2_end = now_seconds();
    p2_seconds += p2_end - p2_begin;
    events_.resume(p2_end);
  };
  if (last && !queue_.empty()) interrupt([&] { run_p2_by_layer(stage.index(), 0); });
  for (int i = stage.layer_count() - 1; i >= stage.first_backward(); --i) {
    Saved& saved = stage.saved(mb, i);
    if (cap_ > 0 && !queue_.empty()) begin += make_room(stage.cost(i, mb).p1_peak, stage.cost(i, mb).p1_held);
    dy = naming_layer([&] { return place_of(s, i); },
                      [&] { return stage.layer(i).backward_p1(std::move(dy), context, saved); });
    saved.release_p1();
    saved.visit_p2([&](const at::Tensor& t) { meter_.rebook(t, stage.index(), MemoryCategory::kStash); });
    units_.clear();
    stage.layer(i).collect_p2(saved, units_);
    units += static_cast<int>(units_.size());
    if (!work_.empty()) {
      --work_[s][i].p1;
      work_[s][i].p2 += static_cast<int>(units_.size());
      if (units_.empty()) check_done(s, i);
    }
    for (const P2Unit& unit : units_) made.push_back({unit, i, static_cast<int>(&unit - units_.data())});
    const int count = static_cast<int>(units_.size());
    if (fused && count > 0) {
      interrupt([&] {
        for (int unit = units - count; unit < units; ++unit) {
          const WUnits one{stage.index(), mb, unit};
          run_unit({&one, 1});
        }
      });
    } else if (count > 0) {
      queue_.add(count);
      if (last) interrupt([&] { run_p2_by_layer(stage.index(), units); });
    }
    progress();
  }
  queue_.end_p1();
  device_times_.close();
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

void RankExecutor::receive(const Instruction& instruction) {
  const bool forward = instruction.op == Op::kRecvForward;
  const int s = local(instruction.stage);
  if (!forward && stages_[s]->first_backward() == stages_[s]->layer_count()) return;  // none was sent
  const int peer_stage = instruction.stage + (forward ? -1 : 1);
  const int from = input_->schedule->rank_of_stage[peer_stage];
  // A message from another process is allocated here while this rank looks for it, or on a thread that talks
  // to other processes.
  const MemoryMeter::Scope scope(instruction.stage, MemoryCategory::kActivations);
  for (int mb = instruction.micro_batch; mb < instruction.micro_batch + instruction.count; ++mb) {
    const Tag tag{input_->step, instruction.stage, mb, forward ? forward_kind() : MessageKind::kBackward};
    Values values;
    while (run_p2(queue_.take_placed(at_))) continue;
    bool there = transport_.try_receive(from, tag, values);
    while (!there && input_->fills_waits && run_p2(queue_.take_filling()))
      there = transport_.try_receive(from, tag, values);
    if (!there) {
      const double begin = now_seconds();
      values = wait_for(from, tag);
      if (started_) idle(cause_of_wait(), begin, now_seconds());
    }
    const int64_t bytes = EventLog::bytes_of(values);
    // Makes room while the message is still on its sender's account.
    const double need = bytes > 0 ? static_cast<double>(bytes + largest_p2_) : 0;
    while (lacks_room(need) && run_p2(queue_.take_oldest())) continue;
    const double arrived = events_.now();
    if (!started_) events_.start_up(arrived);
    for (const auto& tensor : values) {
      const MemoryCategory category = MemoryCategory::kActivations;
      books_messages_ ? meter_.book(tensor, instruction.stage, category)
                      : meter_.rebook(tensor, instruction.stage, category);
    }
    (forward ? boundaries_[s].input : boundaries_[s].output_gradient)[mb] = std::move(values);
    events_.message(Event::Kind::kReceive, instruction.stage, peer_stage, mb, bytes, arrived);
  }
}

Values RankExecutor::wait_for(int from, const Tag& tag) {
  if (turn_ != nullptr) {
    turn_->unlock();
    Values values = transport_.receive(from, tag, input_->timeout);
    turn_->lock();
    return values;
  }
  const double deadline = awake_seconds() + input_->timeout;
  while (reducer_ != nullptr && reducer_->busy()) {
    reducer_->progress();
    Values values;
    if (transport_.try_receive(from, tag, values)) return values;
    if (awake_seconds() >= deadline) fail_waiting(rank_, input_->timeout, tag, from);
    std::this_thread::sleep_for(kPause);
  }
  return transport_.receive(from, tag, std::max(deadline - awake_seconds(), 1e-3));
}

void RankExecutor::idle(IdleCause cause, double begin, double end) {
  result_.times.idle[static_cast<int>(cause)] += end - begin;
  events_.idle(cause, begin, end);
}

}  // namespace twobp
