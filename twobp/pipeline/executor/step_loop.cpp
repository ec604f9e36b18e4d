#include "twobp/pipeline/executor/step_loop.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include <ATen/EmptyTensor.h>
#include <ATen/record_function.h>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/nn/thrown.h"
#include "twobp/pipeline/executor/turns.h"
#include "twobp/pipeline/stage.h"
#include "twobp/transport/message.h"

namespace twobp {
namespace {

int64_t message_bytes(const Values& values) {
  int64_t bytes = 0;
  for (const at::Tensor& tensor : values) bytes += tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0;
  return bytes;
}

// Messages from a rank whose memory is made before they are sent. While one is computed with, the next may arrive.
constexpr int kExpected = 2;

Values take(Values& values) {
  Values taken = std::move(values);
  values.clear();
  return taken;
}

}  // namespace

std::string name_of(const StepRequest& request) {
  return request.training ? concat("step ", request.step) : concat("batch ", request.step, " of an evaluation");
}

void RankParts::progress() {
  transport.progress();
  if (reducer != nullptr) reducer->progress();
}

bool RankParts::others() {
  if (reducer == nullptr || !reducer->busy()) return false;
  progress();
  return reducer->busy();
}

std::string RankParts::place_of(const Stage& stage, int layer) const {
  return concat("stage ", stage.index(), ", layer ", stage.layer_name(layer));
}

void RankParts::expect_gradients(const Stage& stage, int layer, const std::vector<Parameter*>& parameters,
                                 const StepRequest& request) const {
  for (const Parameter* parameter : parameters) {
    TWOBP_CHECK(!parameter->trainable() || parameter->has_grad(), "rank ", rank, ", ", name_of(request), ": ",
                place_of(stage, layer), ": parameter ", parameter->name(),
                " got no gradient, so it would never be trained: add one in backward_p1, or in backward_p2 "
                "with a unit from collect_p2, or freeze the parameter");
  }
}

StepLoop::StepLoop(RankParts& parts, Transport& transport, const StepPlan& plan, const StepRequest& request,
                   const StepBatch& batch, LoopObserver& observer)
    : parts_(parts),
      transport_(transport),
      plan_(plan),
      request_(request),
      batch_(batch),
      observer_(observer),
      loss_(request.loss),
      local_(plan.schedule.stages, -1),
      frozen_left_(plan.schedule.micro_batches) {
  const Schedule& schedule = plan.schedule;
  if (request.training && request.update) streams_ = plan.streams;
  std::vector<bool> gives_gradient(schedule.stages);
  for (size_t s = 0; s < parts_.stages.size(); ++s) {
    Stage& stage = *parts_.stages[s];
    local_[stage.index()] = static_cast<int>(s);
    gives_gradient[stage.index()] = stage.gives_gradient();
    stage.prepare_micro_batches(schedule.micro_batches, schedule.slices);
    const std::vector<Values> none(schedule.micro_batches);
    boundaries_.push_back({none, none, none, none});
    made_.emplace_back(schedule.micro_batches);
    if (parts_.sums(request) || !streams_.empty())
      work_.emplace_back(stage.layer_count(), LayerWork{schedule.micro_batches});
  }
  for (const auto& stage : parts_.stages) {
    for (int i = 0; !streams_.empty() && i < stage->layer_count(); ++i) {
      for (const Parameter* parameter : stage->parameters(i))
        weights_.insert(parameter->value.storage().unsafeGetStorageImpl());
    }
  }
  if (request.training) {
    foreseen_ = std::exchange(parts_.ahead, {batch.next, {}, {}, 0});
    if (foreseen_.of != batch.foreseen) foreseen_ = {};
  }
  documents_.assign(batch.micro_batches.size(), nullptr);
  if (!plan.largest_w.empty()) largest_w_ = plan.largest_w[static_cast<size_t>(parts_.rank)];
  const P2Order order = !streams_.empty()  ? P2Order::kBucket
                        : request.training ? plan.options.p2_order
                                           : P2Order::kOldest;
  queue_ =
      WQueue(schedule, parts_.rank,
             {order, parts_.sums(request), plan.w_places.empty() ? nullptr : &plan.w_places[parts_.rank], streams_});
  // A device that records is not asked whether it is idle. Micro-batches that are to concatenate stay together.
  fills_idle_device_ =
      !plan.w_places.empty() && &transport == &parts.transport && plan.options.batching == P2Batching::kLoop;
  tail_ = w_tail(schedule.ranks[parts_.rank], order, gives_gradient);
  by_layer_ = order == P2Order::kBucket;
  if (parts_.books_messages && request.training) list_expected();
  turns_ = std::make_unique<Turns>(*this);
}

StepLoop::~StepLoop() {
  turns_->end();
}

void StepLoop::list_expected() {
  for (const Fields& fields : batch_.micro_batches) sizes_.push_back(KnownForms::sizes_of(fields));
  if (parts_.known_forms.useful == false) return;
  const Schedule& schedule = plan_.schedule;
  std::set<int> from_ranks;
  for (const Instruction& instruction : schedule.ranks[parts_.rank]) {
    if (instruction.op == Op::kRecvForward || instruction.op == Op::kRecvBackward)
      from_ranks.insert(schedule.rank_of_stage[sender_stage(instruction)]);
  }
  for (const int from : from_ranks) {
    std::deque<Coming> coming;
    for (const auto& [receive, sent_at] : messages_between(schedule, from, parts_.rank)) {
      if (!is_sent(receive)) continue;
      const MessageKind kind = receive.op == Op::kRecvForward ? MessageKind::kForward : MessageKind::kBackward;
      coming.push_back({{request_.step, receive.stage, receive.micro_batch, kind},
                        known_form(kind, receive.stage, receive.micro_batch),
                        sent_at < plan_.leading.end[from]});
    }
    if (std::ranges::any_of(coming, [](const Coming& one) { return one.forms != nullptr; }))
      senders_[from].coming = std::move(coming);
  }
}

void StepLoop::expect_next(int from, const Tag* needed) {
  const auto found = senders_.find(from);
  if (found == senders_.end() || parts_.known_forms.useful == false) return;
  auto& [coming, expected] = found->second;
  const auto is_needed = [&] {
    return needed != nullptr && std::ranges::find(coming, *needed, &Coming::tag) != coming.end();
  };
  while (!coming.empty() && (whole_ || coming.front().early) && (expected < kExpected || is_needed())) {
    const Coming next = coming.front();
    coming.pop_front();
    const MemoryMeter::Scope scope(next.tag.stage, MemoryCategory::kActivations);
    if (next.forms == nullptr) {
      transport_.expect(from, next.tag, {});
      continue;
    }
    double bytes = 0;
    for (const Form& form : *next.forms)
      bytes +=
          static_cast<double>(at::detail::computeStorageNbytes(form.sizes, form.strides, c10::elementSize(form.type)));
    while (lacks_room(bytes + largest_w_) && run_w(queue_.take_oldest())) continue;
    const bool there = transport_.expect(from, next.tag, *next.forms);
    if (!parts_.known_forms.useful) parts_.known_forms.useful = there;
    if (!*parts_.known_forms.useful) return;
    if (!there) continue;
    made_room_for_.push_back(next.tag);
    ++expected;
  }
}

bool StepLoop::is_sent(const Instruction& receive) const {
  const Stage& stage = *parts_.stages[local_[receive.stage]];
  return receive.op == Op::kRecvForward || stage.first_backward() < stage.layer_count();
}

const Forms* StepLoop::known_form(MessageKind kind, int stage, int mb) const {
  return sizes_.empty() ? nullptr : parts_.known_forms.find(kind, stage, sizes_[static_cast<size_t>(mb)]);
}

void StepLoop::run_until(size_t end) {
  whole_ = end == plan_.schedule.ranks[parts_.rank].size();
  for (const auto& [from, sender] : senders_) expect_next(from);
  for (; at_ < end; ++at_) {
    const Instruction& instruction = plan_.schedule.ranks[parts_.rank][at_];
    naming(instruction, [&] {
      if (at_ == tail_.begin && by_layer_) run_w_by_layer(-1, 0);
      execute(instruction);
      if (at_ + 1 < plan_.schedule.ranks[parts_.rank].size()) return;
      if (!streams_.empty()) run_w_by_layer(-1, 0);
      while (run_ahead(/*waits=*/false)) continue;
    });
  }
}

void StepLoop::naming(const Instruction& instruction, const std::function<void()>& body) {
  try {
    body();
  } catch (const Aborted&) {
    turns_->rethrow();
    throw;
  } catch (...) {
    fail("rank ", parts_.rank, ", ", name_of(request_), ", ", to_string(instruction, plan_.schedule.slices), ": ",
         message_of_thrown());
  }
}

void StepLoop::execute(const Instruction& instruction) {
  const int s = local(instruction.stage);
  const int first = instruction.micro_batch;
  const int end = first + instruction.count;
  switch (instruction.op) {
    case Op::kForward:
      for (int mb = first; mb < end; ++mb) {
        if (!turns_->finish()) forward(s, mb);
      }
      break;
    case Op::kBackwardP1:
    case Op::kBackward:
      for (int mb = first; mb < end; ++mb) backward_p1(s, mb, instruction.op == Op::kBackward);
      break;
    case Op::kBackwardP2:
      flush_w(s, first, end);
      break;
    case Op::kSendForward:
    case Op::kSendBackward:
      for (int mb = first; mb < end; ++mb) send(instruction, mb);
      break;
    case Op::kRecvForward:
    case Op::kRecvBackward:
      receive(instruction);
      break;
  }
}

Context StepLoop::context_of(const Fields& fields, int64_t step, int64_t micro_batch) const {
  Context context;
  context.fields = &fields;
  context.seed = request_.seed;
  context.step = step;
  context.micro_batch = request_.first_micro_batch + micro_batch;
  context.training = request_.training || request_.predictions != nullptr;
  return context;
}

Context StepLoop::context_of(int micro_batch) {
  const int slices = plan_.schedule.slices;
  Context context = context_of(batch_.micro_batches[micro_batch], request_.step, micro_batch / slices);
  context.documents = &documents_[micro_batch];
  if (slices > 1) {
    const Cuts& cuts = batch_.cuts[micro_batch / slices];
    const int slice = micro_batch % slices;
    context.slice = {&batch_.sequences[micro_batch / slices], cuts.back(), cuts[slice + 1] - cuts[slice]};
    context.past = cuts[slice];
  }
  context.loss_weight = loss_.weight;
  context.loss_scale = loss_.scale;
  context.experts = &turns_->experts();
  return context;
}

void StepLoop::at_layer(const Stage& stage, int layer, int micro_batch, bool backward) {
  turns_->experts().at(stage, layer, micro_batch, backward);
}

const LayerCost& StepLoop::cost(const Stage& stage, int layer, int mb) const {
  const int slices = plan_.schedule.slices;
  const auto& of_micro_batch = *batch_.costs[static_cast<size_t>(mb / slices)];
  return of_micro_batch[static_cast<size_t>(mb % slices * plan_.schedule.stages + stage.index())]
                       [static_cast<size_t>(layer)];
}

void StepLoop::forward(int s, int mb) {
  if (skips()) return;
  RECORD_USER_SCOPE("F");
  Stage& stage = this->stage(s);
  if (s == 0) --frozen_left_;
  if (foreseen(stage.index(), mb)) return hand_on(s, mb, take(foreseen_.outputs.at(static_cast<size_t>(mb))));
  Context context = context_of(mb);
  Values x = take(boundaries_[s].input[mb]);
  if (stage.index() == 0 && !parts_.input_field.empty())
    x.push_back(on_device(context.field(parts_.input_field), parts_.device.where()));
  observer_.op_begins(Op::kForward, stage.index(), mb, !queue_.empty());
  const MemoryMeter::Scope scope(stage.index(), MemoryCategory::kActivations);
  for (int i = 0; i < stage.layer_count(); ++i) {
    if (request_.training) make_room(cost(stage, i, mb).forward_peak, cost(stage, i, mb).forward_held);
    x = forward_layer(stage, i, mb, std::move(x), context);
  }
  hand_on(s, mb, std::move(x));
  observer_.op_ends(0);
}

Values StepLoop::forward_layer(Stage& stage, int i, int mb, Values x, Context& context) {
  context.backward = request_.training && i >= stage.first_backward();
  at_layer(stage, i, mb, /*backward=*/false);
  x = naming_layer([&] { return parts_.place_of(stage, i); },
                   [&] { return stage.layer(i).forward(std::move(x), context, stage.saved(mb, i)); });
  if (!context.keeps()) {
    stage.saved(mb, i).release();
    if (context.sliced() && mb % plan_.schedule.slices == plan_.schedule.slices - 1) stage.forget_slices(mb, i);
  }
  parts_.progress();
  return x;
}

bool StepLoop::run_ahead(bool waits) {
  ForwardsAhead& ahead = parts_.ahead;
  if (!request_.training || !ahead.of) return false;
  Stage& stage = *parts_.stages.front();
  const int m = static_cast<int>(ahead.outputs.size());
  if (m == ahead.of->count(stage.index())) return false;
  const LayerCost& cost = (*ahead.of->costs[m])[static_cast<size_t>(stage.index())][static_cast<size_t>(ahead.layer)];
  const double need = std::max(cost.forward_peak, cost.forward_held);  // no W is pending
  if (waits && (stage.index() > 0 || frozen_left_ > 0 || lacks_room(need) || skips())) return false;
  const MemoryMeter::Scope scope(stage.index(), MemoryCategory::kActivations);
  if (ahead.layer == 0) ahead.x = input_ahead(stage, m);
  if (skips()) {  // of a step that is given up, messages still go to their receivers
    ahead.x.clear();
    ahead.layer = stage.layer_count();
  } else {
    Context context = context_of(ahead.of->micro_batches[m], ahead.of->step, m);
    observer_.op_begins(Op::kForward, stage.index(), m, !queue_.empty());
    ahead.x = naming_layer([&] { return concat("micro-batch ", m, " of step ", ahead.of->step); },
                           [&] { return forward_layer(stage, ahead.layer, m, std::move(ahead.x), context); });
    if (++ahead.layer < stage.layer_count()) {
      observer_.op_pauses();
      return true;
    }
    observer_.op_ends(0);
  }
  ahead.layer = 0;
  ahead.outputs.push_back(take(ahead.x));
  const int next = stage.index() + 1;
  if (next < plan_.schedule.frozen && m < ahead.of->count(next))
    transport_.isend(plan_.schedule.rank_of_stage[next], tag_ahead(*ahead.of, next, m), take(ahead.outputs.back()));
  return true;
}

Values StepLoop::input_ahead(const Stage& stage, int mb) {
  const NextBatch& of = *parts_.ahead.of;
  if (stage.index() == 0) {
    if (parts_.input_field.empty()) return {};
    return {context_of(of.micro_batches[mb], of.step, mb).field(parts_.input_field)};
  }
  MessageWait message(transport_, plan_.schedule.rank_of_stage[stage.index() - 1], tag_ahead(of, stage.index(), mb));
  wait(message);
  book(message.values, stage.index());
  return std::move(message.values);
}

void StepLoop::hand_on(int s, int mb, Values output) {
  const int next = stage(s).index() + 1;
  if (next < plan_.schedule.stages) {
    if (local(next) < 0) {
      boundaries_[s].output[mb] = std::move(output);
      return;
    }
    for (const auto& tensor : output) parts_.meter.rebook(tensor, next, MemoryCategory::kActivations);
    boundaries_[local(next)].input[mb] = std::move(output);
    return;
  }
  if (output[0].is_cpu()) {
    sum_.sum += output[0].item<double>();
  } else {
    sum_.later.push_back(std::move(output[0]));
  }
  if (request_.predictions != nullptr) {
    (*request_.predictions)[mb].assign(output.begin() + 1, output.end());
  } else if (output.size() > 1) {
    sum_.right = sum_.right.value_or(0) + output[1].item<int64_t>();
  }
}

void StepLoop::backward_p1(int s, int mb, bool fused) {
  Stage& stage = this->stage(s);
  if (stage.first_backward() == stage.layer_count() || skips()) return;
  RECORD_USER_SCOPE("I");
  Context context = context_of(mb);
  Values dy = take(boundaries_[s].output_gradient[mb]);
  const MemoryMeter::Scope scope(stage.index(), MemoryCategory::kActivations);
  observer_.op_begins(Op::kBackwardP1, stage.index(), mb, !queue_.empty());
  const bool by_layer = at_ == tail_.last_p1 && !smallest_first(s);
  made_[s][mb].clear();
  queue_.begin_p1(stage.index(), mb);
  int units = 0;
  if (by_layer && !queue_.empty()) interrupt([&] { run_w_by_layer(stage.index(), 0); });
  for (int i = stage.layer_count() - 1; i >= stage.first_backward(); --i) {
    make_room(cost(stage, i, mb).p1_peak, cost(stage, i, mb).p1_held);
    at_layer(stage, i, mb, /*backward=*/true);
    dy = naming_layer([&] { return parts_.place_of(stage, i); },
                      [&] { return stage.layer(i).backward_p1(std::move(dy), context, stage.saved(mb, i)); });
    const int first = units;
    units += list_units(s, mb, i);
    if (fused && units > first) {
      interrupt([&] {
        for (WUnits one{stage.index(), mb, first}; one.first < units; ++one.first) run_unit({&one, 1});
      });
    } else if (units > first) {
      queue_.add(units - first);
      if (by_layer) interrupt([&] { run_w_by_layer(stage.index(), units); });
    }
    parts_.progress();
  }
  queue_.end_p1();
  if (smallest_first(s) && queue_.all_ended(stage.index())) sort_units(s);
  if (stage.gives_gradient()) hand_back(s, mb, std::move(dy));
  observer_.op_ends(units);
}

int StepLoop::list_units(int s, int mb, int layer) {
  Stage& stage = this->stage(s);
  Saved& saved = stage.saved(mb, layer);
  saved.release_p1();
  if (parts_.bf16_stash) saved.round_p2();
  saved.visit_p2([&](const at::Tensor& t) {
    parts_.meter.rebook(t, stage.index(), MemoryCategory::kStash);
    if (!weights_.empty() && t.defined() && t.has_storage()) weights_.erase(t.storage().unsafeGetStorageImpl());
  });
  std::vector<P2Unit> units;
  stage.layer(layer).collect_p2(saved, units);
  const int count = static_cast<int>(units.size());
  for (int leaf = 0; leaf < count; ++leaf) made_[s][mb].push_back({units[leaf], layer, leaf});
  if (streams(s)) book_gradients(s, stage.parameters(layer));
  if (!work_.empty()) {
    LayerWork& work = work_[s][layer];
    --work.p1;
    for (const P2Unit& unit : units) ++work.p2[unit.layer];
    if (count == 0 && work.p1 == 0) streams(s) ? interrupt([&] { check_done(s, layer); }) : check_done(s, layer);
  }
  return count;
}

void StepLoop::hand_back(int s, int mb, Values gradient) {
  const int previous = stage(s).index() - 1;
  if (local(previous) < 0) {
    boundaries_[s].input_gradient[mb] = std::move(gradient);
    return;
  }
  for (const auto& tensor : gradient) parts_.meter.rebook(tensor, previous, MemoryCategory::kActivations);
  boundaries_[local(previous)].output_gradient[mb] = std::move(gradient);
}

void StepLoop::learn(const Tag& tag, const Values& values) {
  if (sizes_.empty()) return;
  const KnownForms::Sizes& sizes = sizes_[static_cast<size_t>(tag.micro_batch)];
  parts_.known_forms.learn(tag.kind, tag.stage, sizes, values, parts_.device.where().type());
}

void StepLoop::send(const Instruction& instruction, int mb) {
  const bool forward = instruction.op == Op::kSendForward;
  const int s = local(instruction.stage);
  RECORD_USER_SCOPE("send");
  const int peer = instruction.stage + (forward ? 1 : -1);
  if (forward ? foreseen(peer, mb) : !stage(s).gives_gradient()) return;
  Values values = take((forward ? boundaries_[s].output : boundaries_[s].input_gradient)[mb]);
  observer_.message_begins();
  const int64_t bytes = message_bytes(values);
  const Tag tag{request_.step, peer, mb, forward ? forward_kind() : MessageKind::kBackward};
  const int to = plan_.schedule.rank_of_stage[peer];
  if (!sizes_.empty()) values = dense(std::move(values));
  if (const Forms* const forms = known_form(tag.kind, peer, mb)) {
    TWOBP_CHECK(
        forms_of(values) == *forms, to_string(tag),
        " has other sizes than in an earlier step, although its micro-batch has the same: a layer's output must "
        "depend in its sizes on those of its input alone");
    transport_.isend_expected(to, tag, std::move(values));
  } else {
    learn(tag, values);
    transport_.isend(to, tag, std::move(values));
  }
  observer_.message_ends({.sent = true, .stage = instruction.stage, .peer = peer, .micro_batch = mb, .bytes = bytes});
}

void StepLoop::receive(const Instruction& instruction) {
  if (!is_sent(instruction)) return;
  // A message from another process is allocated here while this rank looks for it, or on a thread that talks to other
  // processes.
  const MemoryMeter::Scope scope(instruction.stage, MemoryCategory::kActivations);
  for (int mb = instruction.micro_batch; mb < instruction.micro_batch + instruction.count; ++mb) {
    if (instruction.op != Op::kRecvForward || !foreseen(instruction.stage, mb)) receive(instruction, mb);
  }
}

void StepLoop::receive(const Instruction& instruction, int mb) {
  const bool forward = instruction.op == Op::kRecvForward;
  const int stage = instruction.stage;
  const int peer = stage + (forward ? -1 : 1);
  const int from = plan_.schedule.rank_of_stage[peer];
  const Tag tag{request_.step, stage, mb, forward ? forward_kind() : MessageKind::kBackward};
  RECORD_USER_SCOPE("receive");
  expect_next(from, &tag);
  const bool expected = known_form(tag.kind, stage, mb) != nullptr;
  MessageWait message(transport_, from, tag);
  wait(message);
  Values& values = message.values;
  const int64_t bytes = message_bytes(values);
  if (!expected) learn(tag, values);
  // Makes room while the message is still on its sender's account, unless its memory was made before.
  const bool has_memory = std::erase(made_room_for_, tag) > 0;
  const double need = bytes > 0 ? (has_memory ? 0 : static_cast<double>(bytes)) + largest_w_ : 0;
  while (lacks_room(need) && run_w(queue_.take_oldest())) continue;
  observer_.message_begins();
  book(values, stage);
  Boundary& boundary = boundaries_[local(stage)];
  (forward ? boundary.input : boundary.output_gradient)[mb] = std::move(values);
  observer_.message_ends({.sent = false, .stage = stage, .peer = peer, .micro_batch = mb, .bytes = bytes});
  if (has_memory) --senders_[from].expected;
  expect_next(from);
}

void StepLoop::book(const Values& values, int stage) {
  const MemoryCategory category = MemoryCategory::kActivations;
  for (const auto& tensor : values)
    parts_.books_messages ? parts_.meter.book(tensor, stage, category) : parts_.meter.rebook(tensor, stage, category);
}

void StepLoop::wait(Wait& awaited) {
  if (turns_->is_second()) return turns_->yield(&awaited);
  // In a wait for room, W would make more gradients, and that before the W that waits.
  const bool takes_w = awaited.cause() != WaitCause::kGradients;
  const bool fills = plan_.fills_waits && takes_w;
  const auto may_run_w = [&] { return takes_w && !queue_.empty() && (!sums_streamed() || parts_.reducer->has_room()); };
  while (takes_w && run_w(queue_.take_placed(at_))) continue;
  bool there = awaited.ready();
  while (!there && (turns_->take(awaited) ||
                    (fills && ((may_run_w() && run_w(queue_.take_filling())) || run_ahead(/*waits=*/true)))))
    there = awaited.ready();
  if (there) return;
  observer_.wait_begins(!queue_.empty(), awaited.cause());
  const auto pause = [&](const auto& work) {
    observer_.wait_ends();
    work();
    observer_.wait_begins(!queue_.empty(), awaited.cause());
  };
  wait_for(awaited, parts_.timeout, [&] {
    const bool sums = parts_.others();
    if (sums_streamed() && parts_.reducer->has_summed()) pause([&] { apply_summed(); });
    // W for which there was no room, and on a device that has nothing left to do while its host waits, the next unit.
    const bool wanted = fills || (fills_idle_device_ && parts_.device.compute().idle());
    if (wanted && may_run_w()) pause([&] { run_w(queue_.take_filling()); });
    if (turns_->awaits_tokens() && turns_->ready()) pause([&] { turns_->go_on(); });
    const bool waits_with_w = takes_w && (fills || fills_idle_device_) && !queue_.empty();
    return waits_with_w || sums || turns_->awaits_tokens();
  });
  observer_.wait_ends();
}

}  // namespace twobp
