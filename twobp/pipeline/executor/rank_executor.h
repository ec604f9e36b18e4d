// Runs one rank's instruction list on that rank's thread: one loop and one small handler per op. Knows
// neither models nor schedules by name, and of a device that W may be put in beside F and I (p2_stream.h).
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "twobp/pipeline/executor/device_times.h"
#include "twobp/pipeline/executor/event_log.h"
#include "twobp/pipeline/executor/p2_offers.h"
#include "twobp/pipeline/executor/p2_stream.h"
#include "twobp/pipeline/gradient_reducer.h"
#include "twobp/pipeline/memory/memory_meter.h"
#include "twobp/pipeline/observer.h"
#include "twobp/pipeline/stage.h"
#include "twobp/pipeline/step_input.h"
#include "twobp/schedule/schedule.h"
#include "twobp/transport/transport.h"

namespace twobp {

struct RankResult {
  RankTimes times;
  double loss = 0;
  std::optional<int64_t> right;  // see StepReport
  std::vector<Event> events;
  std::vector<StageTimes> stages;  // of this rank, in their order
  std::vector<MemoryUse> stage_memory;
  MemoryUse memory;
};

class RankExecutor {
 public:
  // The stages' parameters are on `device`, whose compute stream is current on the thread that runs steps.
  RankExecutor(int rank, std::vector<std::unique_ptr<Stage>> stages, Transport& transport, MemoryMeter& meter,
               Device device = {});

  // Messages come from another pipeline object, on whose books their memory is or is not.
  void books_messages() { books_messages_ = true; }
  // The schedule must have been validated. Errors carry rank, step and instruction.
  RankResult run(const StepInput& input);
  // The same in two parts, for a graph of all ranks (see WorkGraph). On a device, while it records: all
  // instructions, behind `begin`; their end. One rank after the other: each until it waits for a message.
  DeviceEvent record(const StepInput& input, const DeviceEvent& begin);
  // Behind `end`, that of the graph, which did what was recorded last: the rest of the step.
  RankResult finish_recorded(const StepInput& input, const DeviceEvent& end);
  // Called by StepInput::finish for each of its waits, so that events show them where they were.
  void waited_in_finish(double begin, double end);
  // Called by StepInput::finish; see RankTimes.
  void exposed_in_finish(double seconds) { result_.times.exposed += seconds; }
  // Steps that train tell it which layers are done; null: none. It outlives the steps.
  void sum_gradients_with(GradientReducer* reducer) { reducer_ = reducer; }
  // Forgets everything of an unfinished step.
  void clear();

  int rank() const { return rank_; }
  const std::vector<std::unique_ptr<Stage>>& stages() const { return stages_; }
  Transport& transport() { return transport_; }

 private:
  // Tensors on their way into or out of a stage, by micro-batch.
  struct Boundary {
    std::vector<Values> input, output, output_gradient, input_gradient;
  };
  struct PendingP2 {
    P2Unit unit;
    int stage = 0;  // index into stages_
    int micro_batch = 0;
    int layer = 0;
    int leaf = 0;         // within the layer
    DeviceEvent ready{};  // behind its I
  };

  // What a layer of a stage still has to do in this step before its gradients are complete.
  struct LayerWork {
    int p1 = 0;  // micro-batches
    int p2 = 0;  // units, of the micro-batches whose I is done
  };

  void prepare(const StepInput& input);
  // What follows the last instruction.
  RankResult end(const StepInput& input);
  // Instructions [at_, end).
  void run_until(size_t end);
  // A recorded step does not add to what is there.
  void expect_no_gradients() const;
  // False if the step is to begin anew.
  bool settle();
  // Takes what other ranks have sent of a step that begins anew, and what this one has not received.
  void drop_unreceived();
  // Errors of `body` carry rank and step, and that they are the update's.
  void in_update(int64_t step, const std::function<void()>& body) const;
  void find_tail();
  void execute(const Instruction& instruction);
  void forward(int s, int micro_batch);
  void backward_p1(int s, int micro_batch, bool fused);
  void flush_p2(int s, int first, int last);
  void receive(const Instruction& instruction);
  // Runs the oldest pending W: one layer, and of it one micro-batch, or all pending ones when they
  // concatenate.
  void run_oldest_p2();
  // The same in a wait: under bucket order of a stage that has no more I, if there is one, whose sums can
  // begin after it.
  void run_filling_p2();
  // On a device: puts in W that it can do beside F and I, some at a time.
  void run_ahead_p2();
  static std::tuple<int, int, int> bucket_order(const PendingP2& pending);
  void run_p2(std::span<PendingP2> together);
  void count_p2(int s, const P2Offers::Spent& spent);
  // Runs the pending W of the stages after `s` and of its layers from `layer` on, last layer first.
  void run_p2_by_layer(int s, int layer);
  // Before the first of the W at the end.
  void run_tail_p2();
  bool offers_p2() const;
  // Runs all pending W, others perhaps some of it; then what others have left.
  void run_offered_p2();
  void help_others();
  P2Offers::Spent run_offered(const OfferedP2& p2);
  void progress();
  void check_done(int s, int layer);
  // Transport::receive, while sums of gradients that are under way go on.
  Values wait_for(int from, const Tag& tag);
  // Whether some memory can be had sooner than by itself: that of W.
  bool holds_p2() const { return !pending_.empty() || p2_stream_.keeps(); }
  // Frees what the oldest W holds.
  void release_oldest_p2();
  // Runs old W until an op that grows to `peak` and leaves `held` fits under the cap, and after it any W that
  // is pending; the seconds it took.
  double make_room(int64_t peak, int64_t held);
  void idle(IdleCause cause, double begin, double end);
  // Of a wait for a message, if it comes to one now.
  IdleCause cause_of_wait() const { return pending_.empty() ? IdleCause::kNothing : IdleCause::kMessage; }
  void log_p2(std::span<PendingP2> together, double begin, double end);
  Context context_of(int micro_batch) const;
  MessageKind forward_kind() const {
    return input_->training ? MessageKind::kForward : MessageKind::kEvaluation;
  }
  // "step 3", or of an evaluation "batch 3 of an evaluation".
  std::string step_name() const;
  int local(int stage) const { return local_[stage]; }

  int rank_;
  P2Stream p2_stream_;
  std::vector<std::unique_ptr<Stage>> stages_;
  Transport& transport_;
  MemoryMeter& meter_;
  EventLog events_;
  GradientReducer* reducer_ = nullptr;

  const StepInput* input_ = nullptr;  // of the step at hand
  double loss_scale_ = 1;
  ProductTime products_;  // when the step began
  int64_t allocations_ = 0;
  int64_t cap_ = 0;
  int64_t largest_p2_ = 0;  // bytes that W of some layer needs meanwhile
  std::vector<int> local_;  // stage -> index into stages_, -1 if it is elsewhere
  // Of this rank's instructions: the one at hand; the first of the W at the end; with bucket order, the I
  // right before that, if nobody waits for its dL/dx, else past the end.
  size_t at_ = 0;
  size_t tail_ = 0;
  size_t last_p1_ = 0;
  std::vector<std::vector<LayerWork>> work_;  // by index into stages_, layer; empty without a reducer
  std::vector<Boundary> boundaries_;
  std::deque<PendingP2> pending_;
  std::vector<PendingP2> together_;
  std::vector<P2Unit> units_;
  std::vector<Saved*> batch_;
  std::vector<DeviceEvent> batch_ready_;
  std::vector<StageTimes> stage_times_;
  DeviceTimes device_times_;
  Values losses_;  // of micro-batches on a device, for which the host waits at the end
  std::unique_lock<std::mutex>* turn_ = nullptr;  // while it records
  // What the instructions that were recorded last write.
  Values recorded_losses_;
  std::vector<Parameter*> recorded_grads_;
  RankResult result_;
  bool started_ = false;                 // a first F has begun
  bool offered_ = false;                 // what was pending at the end
  double helping_ = 0;                   // seconds that others' W took here
  std::vector<P2Offers::Spent> helped_;  // on other ranks, by stages_
  bool books_messages_ = false;
};

}  // namespace twobp
