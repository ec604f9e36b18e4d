// Runs one rank's instruction list on that rank's thread: one loop and one small handler for each op. It
// knows no model and no schedule by name. All it knows of devices is that their work is done later, in the
// order in which it is launched.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "twobp/nn/kernels/attention/document_places.h"
#include "twobp/pipeline/executor/device_times.h"
#include "twobp/pipeline/executor/event_log.h"
#include "twobp/pipeline/gradient_reducer.h"
#include "twobp/pipeline/memory/memory_meter.h"
#include "twobp/pipeline/observer.h"
#include "twobp/pipeline/stage.h"
#include "twobp/pipeline/step_input.h"
#include "twobp/schedule/schedule.h"
#include "twobp/schedule/w_queue.h"
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
  // The stages' parameters are on `device`. Its compute stream is current on the thread that runs steps.
  RankExecutor(int rank, std::vector<std::unique_ptr<Stage>> stages, Transport& transport, MemoryMeter& meter,
               Device device = {});

  // Messages may come from another process or pipeline, so this rank books their memory itself.
  void books_messages() { books_messages_ = true; }
  // The schedule must have been validated. Errors carry rank, step and instruction.
  RankResult run(const StepInput& input);
  // run() in two parts, for a graph of all ranks (see WorkGraph). record() is called while a device records.
  // It launches all instructions after `begin` and returns their end. Ranks take turns: each runs until it
  // waits for a message.
  DeviceEvent record(const StepInput& input, const DeviceEvent& begin);
  // Runs the rest of the step after `end`, the end of the graph that did the recorded instructions.
  RankResult finish_recorded(const StepInput& input, const DeviceEvent& end);
  // StepInput::finish calls this for each of its waits, so that events show the waits where they were.
  void waited_in_finish(double begin, double end);
  // StepInput::finish calls this; see RankTimes.
  void exposed_in_finish(double seconds) { result_.times.exposed += seconds; }
  // In training steps, the executor tells the reducer which layers are done. Null: none. The reducer outlives
  // the steps.
  void sum_gradients_with(GradientReducer* reducer) { reducer_ = reducer; }
  // Forgets all state of an unfinished step.
  void clear();

  int rank() const { return rank_; }
  const std::vector<std::unique_ptr<Stage>>& stages() const { return stages_; }
  Transport& transport() { return transport_; }

 private:
  // Between two looks for messages, while a device computes or gradients are summed.
  static constexpr std::chrono::microseconds kPause{20};

  // Tensors that enter or leave a stage, by micro-batch.
  struct Boundary {
    std::vector<Values> input, output, output_gradient, input_gradient;
  };
  // A unit of W that I has made.
  struct MadeUnit {
    P2Unit unit;
    int layer = 0;
    int leaf = 0;  // within the layer
  };

  // Work that a layer still has in this step before its gradients are complete.
  struct LayerWork {
    int p1 = 0;  // micro-batches
    int p2 = 0;  // units of the micro-batches whose I is done
  };

  void prepare(const StepInput& input);
  // Everything after the last instruction. `whole`: the step was not given up.
  RankResult end(const StepInput& input, bool whole = true);
  // Instructions [at_, end).
  void run_until(size_t end);
  // Throws Error if there are gradients: a recorded step does not add to them.
  void expect_no_gradients() const;
  // False if the step must begin anew.
  bool settle();
  // Receives and drops the messages that other ranks have sent for a step that begins anew.
  void drop_unreceived();
  // "stage 1, layer model.layers.0", for messages.
  std::string place_of(int s, int layer) const;
  // Throws Error if a trainable parameter of the layer has no gradient, although its W is complete.
  void expect_gradients(int s, int layer) const;
  // Whether the rest of the step is given up: F, I and W do nothing.
  bool skips() const;
  // Copies the buffers, which F changes, and puts them back if the step is given up.
  void keep_buffers();
  void put_back();
  // Errors of `body` name rank and step, and say that they are from the update.
  void in_update(int64_t step, const std::function<void()>& body) const;
  // The step's queue of W, and its tail.
  void prepare_w();
  void execute(const Instruction& instruction);
  void forward(int s, int micro_batch);
  void backward_p1(int s, int micro_batch, bool fused);
  void flush_p2(int s, int first, int last);
  void receive(const Instruction& instruction);
  // Runs what the queue gave, if anything, and returns whether it gave something. If micro-batches of
  // [first, last) concatenate, they run together.
  bool run_p2(const std::optional<WUnits>& units, int first, int last);
  bool run_p2(const std::optional<WUnits>& units) {
    return run_p2(units, 0, input_->schedule->micro_batches);
  }
  // Runs one unit of W with these micro-batches.
  void run_unit(std::span<const WUnits> together);
  // See WQueue::take_by_layer.
  void run_p2_by_layer(int stage, int units);
  const MadeUnit& made(const WUnits& units) const {
    return made_[local(units.stage)][units.micro_batch][units.first];
  }
  void progress();
  void check_done(int s, int layer);
  // Transport::receive that keeps sums of gradients going.
  Values wait_for(int from, const Tag& tag);
  // Runs old W until an op fits under the cap. The op grows to `peak` and leaves `held`; any pending W must
  // still fit after it. Returns the seconds it took.
  double make_room(double peak, double held);
  bool lacks_room(double need) const;
  void idle(IdleCause cause, double begin, double end);
  // The idle cause of a wait for a message that begins now.
  IdleCause cause_of_wait() const { return queue_.empty() ? IdleCause::kNothing : IdleCause::kMessage; }
  void log_p2(std::span<const WUnits> together, double begin, double end);
  Context context_of(int micro_batch);
  MessageKind forward_kind() const {
    return input_->training ? MessageKind::kForward : MessageKind::kEvaluation;
  }
  // "step 3", or "batch 3 of an evaluation".
  std::string step_name() const;
  int local(int stage) const { return local_[stage]; }

  int rank_;
  Device device_;
  std::vector<std::unique_ptr<Stage>> stages_;
  Transport& transport_;
  MemoryMeter& meter_;
  EventLog events_;
  GradientReducer* reducer_ = nullptr;

  const StepInput* input_ = nullptr;  // of the current step
  LossFactor loss_scale_ = 1;
  ProductTime products_;  // at the step's begin
  int64_t allocations_ = 0;
  int64_t cap_ = 0;
  int64_t largest_p2_ = 0;  // bytes that the W of some layer needs while it runs
  std::vector<int> local_;  // stage -> index into stages_; -1 if it is on another rank
  size_t at_ = 0;           // the current instruction
  WTail tail_;
  std::vector<std::vector<LayerWork>> work_;  // by index into stages_, layer; empty without a reducer
  std::vector<Boundary> boundaries_;
  WQueue queue_;
  std::vector<std::vector<std::vector<MadeUnit>>>
      made_;  // by index into stages_, micro-batch; in their order
  std::vector<P2Unit> units_;
  std::vector<Saved*> batch_;
  std::vector<StageTimes> stage_times_;
  DeviceTimes device_times_;
  Values losses_;  // of micro-batches on a device; the host waits for them at the end
  std::vector<std::shared_ptr<const DocumentPlaces>> documents_;  // of the micro-batches; see Context
  std::unique_lock<std::mutex>* turn_ = nullptr;                  // while it records
  std::vector<at::Tensor> buffers_;                               // copies
  // Written by the recorded instructions.
  Values recorded_losses_;
  std::vector<Parameter*> recorded_grads_;
  RankResult result_;
  bool started_ = false;  // the first F has begun
  bool books_messages_ = false;
};

}  // namespace twobp
