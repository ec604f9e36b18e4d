// A rank's loop over its instructions of one step: F, I, W, send and receive, with one small handler each. While it
// waits, it runs W (WQueue). It knows no model and no schedule by name, and is gone when the step is over. All it knows
// of devices is that their work is done later, in the order in which it is launched.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "twobp/core/wait.h"
#include "twobp/nn/expert_group.h"
#include "twobp/nn/kernels/attention/packed_attention.h"
#include "twobp/pipeline/executor/companion.h"
#include "twobp/pipeline/executor/known_forms.h"
#include "twobp/pipeline/executor/loop_observer.h"
#include "twobp/pipeline/gradient_reducer.h"
#include "twobp/pipeline/memory/memory_meter.h"
#include "twobp/pipeline/stage.h"
#include "twobp/pipeline/step_plan.h"
#include "twobp/pipeline/step_request.h"
#include "twobp/schedule/w_queue.h"
#include "twobp/transport/transport.h"

namespace twobp {

// F of the rank's frozen stage for the micro-batches of the next step, as far as they have run.
struct ForwardsAhead {
  std::shared_ptr<const NextBatch> of;  // null: no F runs
  std::vector<Values> outputs;          // of those that are done; empty: sent
  Values x;                             // of the next one, before this layer
  int layer = 0;
};

// What a rank keeps from step to step.
struct RankParts {
  int rank = 0;
  Device device;  // of the stages' parameters. Its compute stream is current on the rank's thread.
  std::vector<std::unique_ptr<Stage>> stages;
  Transport& transport;
  MemoryMeter& meter;
  double timeout = 300;     // seconds, of each wait
  std::string input_field;  // see ModelSpec
  bool bf16_stash = false;  // likewise
  // Messages may come from another process or pipeline, so this rank books their memory itself.
  bool books_messages = false;
  KnownForms known_forms{};  // of its messages, if it books them
  // Is told in training steps which layers are done. Null: none.
  GradientReducer* reducer = nullptr;
  Transport* experts = nullptr;  // the members of its group (ExpertGroup); null: each replica has all experts
  ForwardsAhead ahead{};
  std::unique_ptr<Companion> companion{};  // null until F or I take turns

  // Keeps messages and sums going.
  void progress();
  // The same between two looks at what the rank waits for. Returns whether it must be called again soon.
  bool others();
  // "stage 1, layer model.layers.0", for messages.
  std::string place_of(const Stage& stage, int layer) const;
  // Throws Error if one of these parameters of the layer is trained, but has no gradient, although its W is complete.
  void expect_gradients(const Stage& stage, int layer, const std::vector<Parameter*>& parameters,
                        const StepRequest& request) const;
  // Whether sums over replicas follow this step.
  bool sums(const StepRequest& request) const { return reducer != nullptr && request.training; }
};

// "step 3", or "batch 3 of an evaluation".
std::string name_of(const StepRequest& request);

// The loss of the micro-batches that a rank computed.
struct LossSum {
  double sum = 0;
  std::optional<int64_t> right;  // see StepReport
  Values later;                  // of micro-batches on a device; the host waits for them at the end
};

class StepLoop {
 public:
  // All arguments outlive it. `transport` is that of `parts`, or, while a device records, one that wraps it.
  StepLoop(RankParts& parts, Transport& transport, const StepPlan& plan, const StepRequest& request,
           const StepBatch& batch, LoopObserver& observer);
  ~StepLoop();

  // Runs the instructions up to this one. Errors name rank, step and instruction.
  void run_until(size_t end);
  // The factor is known only when the previous step has ended.
  void set_loss_scale(double scale) { loss_.scale = scale; }
  LossSum take_loss() { return std::move(sum_); }

 private:
  // Tensors that enter or leave a stage, by micro-batch.
  struct Boundary {
    std::vector<Values> input, output, output_gradient, input_gradient;
  };
  class Experts;
  class Turns;
  struct Coming {
    Tag tag;
    const Forms* forms;  // null: it comes with a description
    bool early;          // sent in the leading part of the sender's list
  };
  // A rank that sends messages without a description.
  struct Sender {
    std::deque<Coming> coming;  // all of them, in the order of the sender's list
    int expected = 0;           // messages whose memory waits for them
  };
  // Work that a layer still has in this step before its gradients are complete.
  struct LayerWork {
    int p1 = 0;                         // micro-batches
    std::map<Layer*, int> p2{};         // by leaf: units of the micro-batches whose I is done
    std::vector<Parameter*> applied{};  // of a stage that streams its gradients

    bool has_p2() const {
      return std::ranges::any_of(p2, [](const auto& leaf) { return leaf.second > 0; });
    }
    // Whether its W reads weights to which other units add, so that none may change before the last unit.
    bool reads_weights() const {
      return std::ranges::any_of(p2, [](const auto& leaf) { return leaf.first->p2_reads_other_weights(); });
    }
  };

  void execute(const Instruction& instruction);
  // Errors of `body` name rank, step and instruction.
  void naming(const Instruction& instruction, const std::function<void()>& body);
  void forward(int s, int micro_batch);
  Values forward_layer(Stage& stage, int layer, int micro_batch, Values x, Context& context);
  // Runs a layer of the frozen stage for the next step. Returns false if there is none to run: in a wait, where no W
  // may run, only the first stage does, when its own F are done and there is room.
  bool run_ahead(bool waits);
  Values input_ahead(const Stage& stage, int micro_batch);
  Tag tag_ahead(const NextBatch& of, int stage, int micro_batch) const {
    return {-of.step, stage, micro_batch, MessageKind::kForward};
  }
  // Whether the step before has run this F.
  bool foreseen(int stage, int micro_batch) const {
    return foreseen_.of && stage < plan_.schedule.frozen && micro_batch < foreseen_.of->count(stage);
  }
  // Gives the output of a stage to the next one, or adds up the loss.
  void hand_on(int s, int micro_batch, Values output);
  void backward_p1(int s, int micro_batch, bool fused);
  // Lists the units of W that I of a layer has made, and returns their number.
  int list_units(int s, int micro_batch, int layer);
  void hand_back(int s, int micro_batch, Values gradient);
  void send(const Instruction& instruction, int micro_batch);
  void receive(const Instruction& instruction);
  void receive(const Instruction& instruction, int micro_batch);
  // Puts the memory of a received message on the stage's account.
  void book(const Values& values, int stage);
  // Lists the messages from ranks of which some come without a description.
  void list_expected();
  // Tells the transport of the next ones from this rank, up to `needed` in any case, after old W has made room.
  void expect_next(int from, const Tag* needed = nullptr);
  // Whether the message exists: no gradient goes to a stage that needs none.
  bool is_sent(const Instruction& receive) const;
  // Notes the form of a message with a description.
  void learn(const Tag& tag, const Values& values);
  // Null: the message comes and goes with a description.
  const Forms* known_form(MessageKind kind, int stage, int micro_batch) const;
  // Runs W while it is not there, if the plan says so, and applies gradients that have been summed. The only place
  // where the loop waits.
  void wait(Wait& awaited);
  void flush_w(int s, int first, int last);
  // Runs what the queue gave, if anything, and returns whether it gave something. If micro-batches of
  // [first, last) concatenate, they run together.
  bool run_w(const std::optional<WUnits>& units, int first, int last);
  bool run_w(const std::optional<WUnits>& units) { return run_w(units, 0, plan_.schedule.micro_batches); }
  // Runs one unit of W with these micro-batches.
  void run_unit(std::span<const WUnits> together);
  // See WQueue::take_by_layer. If the replica is ahead of others, it waits before streamed gradients pile up in sums.
  // Ranks never wait in a circle: no F or I of the schedule needs a message of one that waits here, and who needs its
  // exchange of experts has begun the same sums. So all come to their ends, where replicas begin the same sums in one
  // order. What the last of them has begun all have, so it waits for nothing that another has yet to compute.
  void run_w_by_layer(int stage, int units);
  // Runs `w` in the middle of an F or I.
  template <typename RunW>
  void interrupt(const RunW& w) {
    observer_.op_pauses();
    w();
    observer_.op_resumes();
  }
  const LayerCost& cost(const Stage& stage, int layer, int mb) const;
  // Runs old W until an op fits under the cap. The op grows to `peak` and leaves `held`; any pending W must still fit
  // after it.
  void make_room(double peak, double held);
  double need(double peak, double held) const { return std::max(peak, held + largest_w_); }
  bool has_cap() const { return plan_.cap(parts_.rank) > 0; }
  bool lacks_room(double need) const;
  // Hands on gradients that are complete, after this leaf's W, or if none will ever come: those of a whole layer to the
  // reducer, streamed ones to the update.
  void check_done(int s, int layer, Layer* leaf = nullptr);
  // The parameters whose gradients are complete, and not applied yet: those of the leaf, or of the layer if it is done.
  std::vector<Parameter*> complete(int s, int layer, Layer* leaf) const;
  void apply(const std::vector<Parameter*>& parameters);
  // Whether streamed gradients are summed over replicas before they are applied.
  bool sums_streamed() const { return !streams_.empty() && parts_.sums(request_); }
  void apply_summed();
  // Whether W waits for the end of the stage's I, and then runs in the order of the gradients' bytes: those of small
  // weights while most of the stash is there, those of large ones when it is gone. Sums over replicas begin earlier,
  // and in one order on all of them, without it.
  bool smallest_first(int s) { return streams(s) && !parts_.sums(request_); }
  void sort_units(int s);
  bool streams(int s) { return !streams_.empty() && streams_[static_cast<size_t>(stage(s).index())]; }
  // Books the memory that gradients of these parameters have taken in I.
  void book_gradients(int s, const std::vector<Parameter*>& parameters);
  // Whether the rest of the step is given up: F, I and W do nothing.
  bool skips() const { return request_.early_end && request_.early_end->skips(); }
  Context context_of(int micro_batch);
  Context context_of(const Fields& fields, int64_t step, int64_t micro_batch) const;
  // Says which layer the next exchanges and counts of experts are for.
  void at_layer(const Stage& stage, int layer, int micro_batch, bool backward);
  MessageKind forward_kind() const { return request_.training ? MessageKind::kForward : MessageKind::kEvaluation; }
  Stage& stage(int s) { return *parts_.stages[s]; }
  // The index into parts_.stages; -1 if the stage is on another rank.
  int local(int stage) const { return local_[stage]; }
  const MadeUnit& made(const WUnits& units) const { return made_[local(units.stage)][units.micro_batch][units.first]; }

  RankParts& parts_;
  Transport& transport_;
  const StepPlan& plan_;
  const StepRequest& request_;
  const StepBatch& batch_;
  LoopObserver& observer_;

  LossFactors loss_;
  std::vector<int> local_;
  size_t at_ = 0;           // the current instruction
  ForwardsAhead foreseen_;  // what the step before has run for this one
  int frozen_left_;         // F of the rank's frozen stage that are to come
  WQueue queue_;
  bool fills_idle_device_ = false;
  WTail tail_;
  bool by_layer_ = false;                                 // the tail runs layer by layer
  double largest_w_ = 0;                                  // bytes that the W of some layer needs while it runs
  std::vector<Boundary> boundaries_;                      // by index into parts_.stages
  std::vector<KnownForms::Sizes> sizes_;                  // by micro-batch; empty: every message has a description
  std::map<int, Sender> senders_;                         // by rank
  std::vector<Tag> made_room_for_;                        // of messages whose memory waits for them
  bool whole_ = false;                                    // the list runs to its end, not only its leading part
  std::vector<std::vector<std::vector<MadeUnit>>> made_;  // by the same index, and micro-batch; in order
  // The memory of weights that no stash is a view of. Others change at the end of the step. Empty if no stage streams.
  std::set<const void*> weights_;
  std::vector<bool> streams_;                 // by stage: see StepPlan; empty: none
  std::vector<std::vector<LayerWork>> work_;  // by index into parts_.stages, and layer; empty: nobody is told
  std::vector<std::shared_ptr<const DocumentPlaces>> documents_;  // of the micro-batches; see Context
  std::unique_ptr<Turns> turns_;
  LossSum sum_;
};

}  // namespace twobp
