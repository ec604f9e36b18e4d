#include "twobp/pipeline/executor/rank_executor.h"

#include <limits>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/core/wait.h"
#include "twobp/nn/thrown.h"
#include "twobp/transport/message.h"

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

class DeviceWait : public Wait {
 public:
  explicit DeviceWait(const DeviceStream& compute) : compute_(compute) {}
  WaitCause cause() const override { return WaitCause::kDevice; }
  bool ready() override { return compute_.idle(); }
  // A step may be of any length, so its device is waited for without a time-out.
  [[noreturn]] void fail(double /*timeout*/) const override { twobp::fail("the device does not end its work"); }

 private:
  const DeviceStream& compute_;
};

// Errors of `body` name rank and step, and say that they are from the update.
template <typename Body>
auto in_update(int rank, int64_t step, const Body& body) {
  try {
    return body();
  } catch (const Aborted&) {
    throw;
  } catch (...) {
    fail("rank ", rank, ", step ", step, ", update: ", message_of_thrown());
  }
}

}  // namespace

// Lets the other ranks have the turn while this one waits for a message.
class RankExecutor::TakesTurns : public Transport {
 public:
  TakesTurns(Transport& transport, std::unique_lock<std::mutex>& turn) : transport_(transport), turn_(turn) {}
  int rank() const override { return transport_.rank(); }
  int size() const override { return transport_.size(); }
  void isend(int to, const Tag& tag, Values values) override { transport_.isend(to, tag, std::move(values)); }
  bool try_receive(int from, const Tag& tag, Values& values) override {
    return transport_.try_receive(from, tag, values);
  }
  Values receive(int from, const Tag& tag, double timeout) override {
    turn_.unlock();
    Values values = transport_.receive(from, tag, timeout);
    turn_.lock();
    return values;
  }
  void abort(const std::string& reason) override { transport_.abort(reason); }

 private:
  Transport& transport_;
  std::unique_lock<std::mutex>& turn_;
};

// The buffers, which F changes, as they are now: a step that is given up puts them back.
class RankExecutor::CopiesOfBuffers {
 public:
  explicit CopiesOfBuffers(const std::vector<std::unique_ptr<Stage>>& stages) : stages_(stages) {
    const MemoryMeter::Scope scope(stages.front()->index(), MemoryCategory::kParameters);
    visit_parameters(stages, [&](const Parameter& parameter) {
      if (parameter.is_buffer()) copies_.push_back(parameter.value.clone());
    });
  }
  // Gradients of the step are dropped, too.
  void put_back() {
    size_t i = 0;
    visit_parameters(stages_, [&](Parameter& parameter) {
      parameter.forget_grad();
      if (parameter.is_buffer()) parameter.value.copy_(copies_[i++]);
    });
  }

 private:
  const std::vector<std::unique_ptr<Stage>>& stages_;
  std::vector<at::Tensor> copies_;
};

RankExecutor::RankExecutor(RankParts parts, bool accounts) : parts_(std::move(parts)) {
  if (accounts) accounts_ = std::make_unique<Accounts>(parts_.rank, parts_.stages, parts_.meter, parts_.device);
}

void RankExecutor::clear() {
  for (auto& stage : parts_.stages) stage->release_saved();
  parts_.ahead = {};
}

void RankExecutor::begin_accounts(const StepRequest& request, bool timed) {
  if (accounts_) accounts_->begin_step(request.want_events, timed);
}

LoopObserver& RankExecutor::observer() {
  static LoopObserver none;
  return accounts_ ? *accounts_ : none;
}

RankResult RankExecutor::run(const StepPlan& plan, const StepRequest& request, const StepBatch& batch,
                             bool begun_early) {
  EarlyEnd* const early_end = request.early_end.get();
  std::optional<CopiesOfBuffers> buffers;
  if (early_end != nullptr && early_end->may_give_up() && request.training) buffers.emplace(parts_.stages);
  if (parts_.sums(request)) parts_.reducer->start();
  std::unique_ptr<StepLoop> loop;
  if (begun_early && request.update) {
    loop = begin_early(plan, request, batch);
  } else {
    begin_accounts(request, /*timed=*/true);
    loop = std::make_unique<StepLoop>(parts_, parts_.transport, plan, request, batch, observer());
  }
  loop->run_until(plan.schedule.ranks[parts_.rank].size());
  LossSum loss = loop->take_loss();
  loop.reset();
  parts_.known_forms.end_step();
  const bool whole = early_end == nullptr || (request.training ? early_end->completes() : !early_end->given_up());
  if (!whole) {
    for (auto& stage : parts_.stages) stage->release_saved();
    if (buffers) buffers->put_back();
  }
  return end(plan, request, std::move(loss), whole);
}

std::unique_ptr<StepLoop> RankExecutor::begin_early(const StepPlan& plan, const StepRequest& request,
                                                    const StepBatch& batch) {
  // Not the F of the last stage: the loss multiplies its gradient by the scale already in F.
  const size_t leading = plan.leading.end[parts_.rank];
  const auto begin = [&] {
    begin_accounts(request, /*timed=*/true);
    auto loop = std::make_unique<StepLoop>(parts_, parts_.transport, plan, request, batch, observer());
    loop->run_until(leading);
    return loop;
  };
  std::unique_ptr<StepLoop> loop = begin();
  observer().wait_begins(/*w_pending=*/false, WaitCause::kNorm);
  const Settled settled = in_update(parts_.rank, request.step - 1, [&] { return request.update->settle(parts_.rank); });
  observer().wait_ends();
  if (!settled.stands) {
    loop.reset();
    clear();
    drop_unreceived(plan, request, batch);
    parts_.device.compute().wait_on_host();  // on the device, too, work in vain is start-up
    loop = begin();
  }
  loop->set_loss_scale(settled.loss_scale);
  return loop;
}

void RankExecutor::drop_unreceived(const StepPlan& plan, const StepRequest& request, const StepBatch& batch) {
  for (const Instruction& receive : plan.leading.unreceived[parts_.rank]) {
    const int from = plan.schedule.rank_of_stage[receive.stage - 1];
    const MemoryMeter::Scope scope(receive.stage, MemoryCategory::kActivations);
    const Tag tag{request.step, receive.stage, receive.micro_batch, MessageKind::kForward};
    const auto& fields = batch.micro_batches[static_cast<size_t>(receive.micro_batch)];
    const Forms* const forms = parts_.known_forms.find(tag.kind, receive.stage, KnownForms::sizes_of(fields));
    if (parts_.books_messages && forms) parts_.transport.expect(from, tag, *forms);
    MessageWait dropped(parts_.transport, from, tag);
    wait_for(dropped, parts_.timeout);
  }
}

DeviceEvent RankExecutor::record(const StepPlan& plan, const StepRequest& request, const StepBatch& batch,
                                 const DeviceEvent& begin, std::mutex& turn) {
  expect_no_gradients();
  {
    std::unique_lock has_turn(turn);
    TakesTurns transport(parts_.transport, has_turn);
    LoopObserver none;
    StepLoop loop(parts_, transport, plan, request, batch, none);
    parts_.device.compute().wait(begin);
    loop.run_until(plan.schedule.ranks[parts_.rank].size());
    recorded_loss_ = loop.take_loss();
  }
  recorded_grads_.clear();
  visit_parameters(parts_.stages, [&](Parameter& parameter) {
    if (!parameter.has_grad()) return;
    recorded_grads_.push_back(&parameter);
    parameter.forget_grad();  // until the graph has written it
  });
  return parts_.device.compute().record();
}

void RankExecutor::expect_no_gradients() const {
  visit_parameters(parts_.stages, [](const Parameter& parameter) {
    TWOBP_CHECK(!parameter.has_grad(), "pipeline.graphs is set, but ", parameter.name(),
                " already has a gradient, which a recorded step would overwrite: clear it before the step");
  });
}

RankResult RankExecutor::finish_recorded(const StepPlan& plan, const StepRequest& request, const DeviceEvent& end) {
  expect_no_gradients();
  parts_.device.compute().wait(end);
  begin_accounts(request, /*timed=*/false);
  for (Parameter* parameter : recorded_grads_) parameter->mark_grad_written();
  return this->end(plan, request, recorded_loss_, /*whole=*/true);
}

void RankExecutor::drain_device() {
  const DeviceStream& compute = parts_.device.compute();
  DeviceWait device(compute);
  wait_for(device, std::numeric_limits<double>::infinity(), [&] {
    parts_.progress();
    return false;
  });
}

RankResult RankExecutor::end(const StepPlan& plan, const StepRequest& request, LossSum loss, bool whole) {
  drain_device();
  RankResult result{loss.sum, loss.right, {}};
  if (!loss.later.empty()) {
    const at::Tensor losses = at::stack(loss.later).cpu();  // the host waits once
    for (int64_t i = 0; i < losses.numel(); ++i) result.loss += losses[i].item<double>();
  }
  // An evaluation leaves nothing on the books of the next step.
  if (!request.training) parts_.transport.flush(parts_.timeout);
  parts_.device.compute().wait_on_host();  // the update is timed separately
  parts_.transport.progress();             // what was sent is there now
  if (accounts_) accounts_->device_is_done();
  if (request.training && whole && parts_.reducer == nullptr && plan.schedule.has_backward()) {
    for (const auto& stage : parts_.stages) {
      if (request.update && !plan.streams.empty() && plan.streams[stage->index()]) continue;  // the loop has looked
      for (int i = stage->first_backward(); i < stage->layer_count(); ++i)
        parts_.expect_gradients(*stage, i, stage->parameters(i), request);
    }
  }
  if (request.update && whole) update(request);
  if (accounts_) result.account = accounts_->end_step(plan.schedule.ranks[parts_.rank].size());
  return result;
}

void RankExecutor::update(const StepRequest& request) {
  if (accounts_) accounts_->last_update_begins();
  const std::vector<Waited> waits =
      in_update(parts_.rank, request.step, [&] { return request.update->run(parts_.rank); });
  if (accounts_) {
    accounts_->last_update_ends(waits);
  } else {
    parts_.device.compute().wait_on_host();  // other ranks read what the update wrote
  }
}

}  // namespace twobp
