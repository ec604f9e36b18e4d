// The training loop over a pipeline: data in, steps, evaluation. It prints nothing; the caller shows the results. In a
// run of several processes or replicas each has a trainer, and all make the same calls in the same order. A call
// returns the same everywhere, except for reports (see Pipeline::run).
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "twobp/data/data.h"
#include "twobp/models/model.h"
#include "twobp/nn/parameter.h"
#include "twobp/pipeline/observer.h"
#include "twobp/train/config.h"
#include "twobp/transport/world.h"

namespace twobp {

class FaultInjection;
class Pipeline;
class Update;
struct LossScale;
struct RunAhead;
struct StepPlan;
struct StreamedGradients;
struct Variant;

struct StepResult {
  int64_t step = 0;  // counted from 1
  double loss = 0;   // mean over the counted targets of the global batch, before the update
  double lr = 0;
  double grad_norm = 0;
  bool skipped = false;   // fp16: the gradient overflowed, no weight has changed
  double loss_scale = 1;  // fp16: the loss scale of this step
  int64_t tokens = 0;
  double input_wait = 0;              // seconds that the ranks waited for the loader
  std::vector<std::string> warnings;  // batches that were left out before this step
  bool stop = false;                  // a process wants to stop: see stop_when
  // The step was given up because of that, and `step` is the one before it. Nothing else here is known.
  bool given_up = false;
  StepReport report;
};

struct Evaluation {
  double loss = 0;                 // mean over the counted targets
  std::optional<double> accuracy;  // fraction predicted right, from 0 to 1, for models that predict

  bool operator==(const Evaluation&) const = default;
};

struct BatchEvaluation {
  double loss = 0;               // sum over the counted targets
  std::optional<int64_t> right;  // correct predictions, for models that predict
};

// The position of a training run, in addition to its weights and optimizer state.
struct TrainingPosition {
  int64_t step = 0;        // steps done, including those with a skipped update
  int64_t batches = 0;     // batches taken from the loader
  double loss_scale = 1;   // of fp16
  int64_t good_steps = 0;  // since the loss scale last changed
};

class Trainer {
 public:
  // Opens the data, profiles the layers, splits the model and makes the pipeline.
  Trainer(const Config& config, World world);
  // Runs all ranks in this process.
  explicit Trainer(const Config& config);
  // The same with the caller's own model and data. Of the configuration, only the sections pipeline, optimizer and
  // train are used, and data.shuffle.
  Trainer(const Config& config, const ModelSpec& model, DataSplit data, World world);
  Trainer(const Config& config, const ModelSpec& model, DataSplit data);
  ~Trainer();

  // Makes one optimizer step on the next batch with a counted label. Batches without one are left out, with
  // a warning in the result: they are no steps and change nothing. Throws Error if the loss or a gradient is not
  // finite, or a whole epoch has no counted label.
  StepResult step();
  // From now on, up to step `last`, step() may begin the next step on ranks that have ended theirs (run_ahead()). Until
  // step `last` is done, only the results of step() may be used. Every process makes the same call.
  void run_ahead_until(int64_t last) { last_ahead_ = last; }
  // Makes one step on the given batch, which must have a counted label. `lr` takes the place of the learning rate of
  // the configuration. `next`: the first micro-batches of the next step (forwards_ahead()), if they are known. They
  // change no bit of any step, also if the next step has others. An error of F in them comes a step early.
  StepResult step(const Batch& batch, const Variant& variant, std::optional<double> lr = std::nullopt,
                  std::vector<Fields> next = {});
  // The number of micro-batches of the next step for which frozen stages can run F in this one (StepPlan::ahead).
  int forwards_ahead();

  // Calls `body` while the weights are their running means, if optimizer.average is set: to evaluate them, or, within
  // Update::with_masters, to save them.
  // The weights come back also if `body` throws, unless another process has ended.
  void with_averages(const std::function<void()>& body);
  // Evaluates the held-out part (at most train.eval_batches batches), with the running means of the weights if there
  // are any. Returns none if it does not exist, or
  // if a process wants to stop. Throws Error if the loss is not finite.
  std::optional<Evaluation> evaluate();
  // Evaluates one batch of the caller's, the `number`-th of an evaluation, counted from 1, with the weights as they are
  // (with_averages). With `predictions`, layers run F as in training, which may leave numbers in their buffers, and
  // these get what the last layer gives beside the loss, by micro-batch, in the process that runs it. Returns none if a
  // process wants to stop.
  std::optional<BatchEvaluation> evaluate(const Batch& batch, int64_t number,
                                          std::vector<Values>* predictions = nullptr);

  // Calls `asked` at the end of every step, and of every batch of an evaluation, on each process, to find out whether
  // the run is to stop. One process that says so is enough: see StepResult::stop. A run of one process and one replica
  // calls it within steps as well, on any thread, and gives up the step, unless the step overlaps with another one, is
  // launched as a graph, or is traced. After a step that was given up, the trainer stands where it stood before it.
  void stop_when(std::function<bool()> asked) { stop_ = std::move(asked); }
  // Whether a process wants to stop, which all of them know, and no step is under way any more.
  bool stopping() const { return stopping_ && under_way_.empty(); }

  int64_t steps_done() const { return step_; }
  int micro_batches() const { return micro_batches_; }
  const Variant& variant() const { return *variant_; }
  const RunAhead& run_ahead() const { return *run_ahead_; }
  const StreamedGradients& gradients() const { return *gradients_; }
  Loader& loader() { return *loader_; }
  const Config& config() const { return config_; }
  Pipeline& pipeline() { return *pipeline_; }
  const World& world() const;
  // See Update::weights.
  const std::vector<Parameter*>& weights() const;
  const DataSplit& data() const { return data_; }
  // Parameters without tensors in model.from, such as the head of an encoder that was saved without one. They start as
  // in a new model.
  const std::vector<std::string>& new_parameters() const { return new_parameters_; }
  // Tensors of model.from that the model has no use for, such as an encoder's pooler.
  const std::vector<std::string>& unused_tensors() const { return unused_tensors_; }
  // For checkpoints, which hold the update and the position. go_on_from() sets a new trainer to another trainer's
  // position. The update holds weights and optimizer state (see Checkpointer).
  Update& update() { return *update_; }
  TrainingPosition position() const;
  void go_on_from(const TrainingPosition& position);
  // Every process adds the same observers, because all must know whether a step's events are wanted. Only the first
  // process notifies them of steps, but each of its gradients.
  void add_observer(std::shared_ptr<Observer> observer);

 private:
  // The parts that are made before the pipeline, in order of their construction.
  struct Parts;
  Trainer(const Config& config, Parts parts);
  // Loads the weights that the configuration names.
  void load(const Config& config);

  struct StepUnderWay;
  struct NextBatch;
  struct KeptPlan;
  class UpdateOfStep;
  void make_loader();
  LoaderOptions loader_options() const;
  // Replaces the counts of each replica's batch by their sums over replicas.
  void count_replicas(int64_t& targets, int64_t& tokens);
  // Takes the next batch with a counted label from the loader. Returns false if the wait was given up.
  bool read_batch_for(StepUnderWay& step);
  void count(StepUnderWay& step);
  const StepPlan& plan_for(const Variant& variant, int micro_batches);
  // Returns false if the wait for data was given up.
  bool begin_next();
  // Whether this process decides by itself when to stop. Several must agree on a step or batch.
  bool stops_alone() const;
  bool may_give_up(int64_t step) const;
  // Takes the next batch out of the loader if it is there, and if frozen stages have a use for it.
  void look_ahead(StepUnderWay& step);
  // Forgets the newest batch of the loader.
  void give_back_batch();
  void begin(std::unique_ptr<StepUnderWay> step, const Variant& variant, std::optional<double> lr = std::nullopt);
  // Ends the oldest step under way.
  StepResult end();
  void finish(StepUnderWay& step);
  // Waits for the step's ranks. Meanwhile, replicas read the batch of the step that begins next.
  void wait_for_report(StepUnderWay& step);
  // Whether the step may begin while the previous step is under way.
  bool may_run_ahead(int64_t step) const;
  int64_t next_step() const { return step_ + static_cast<int64_t>(under_way_.size()) + 1; }
  bool wants_events(int64_t step) const;
  // Runs `body`. An error ends the steps under way.
  template <typename Body>
  StepResult or_error(const Body& body);
  // Throws Error if a step is under way.
  void check_still() const;
  std::optional<Evaluation> evaluate_held_out();

  Config config_;
  int micro_batches_;
  DataSplit data_;
  std::shared_ptr<FaultInjection> faults_;  // null except in tests of failures
  std::unique_ptr<Pipeline> pipeline_;
  std::unique_ptr<Update> update_;
  std::unique_ptr<Loader> loader_;
  std::unique_ptr<NextBatch> next_;   // of the loader; it counts as taken when its step begins
  std::unique_ptr<Variant> variant_;  // used by step(); a schedule in a file is read once
  std::unique_ptr<RunAhead> run_ahead_;
  std::unique_ptr<StreamedGradients> gradients_;
  std::vector<std::unique_ptr<KeptPlan>> plans_;  // of all variants so far
  std::vector<std::shared_ptr<Observer>> observers_;
  std::vector<std::string> new_parameters_;
  std::vector<std::string> unused_tensors_;
  int64_t step_ = 0;
  int64_t batches_ = 0;  // taken from the loader, including those that were left out
  int64_t left_out_ = 0;
  std::unique_ptr<LossScale> loss_scale_;
  std::function<bool()> stop_;
  std::deque<std::unique_ptr<StepUnderWay>> under_way_;  // oldest first
  int64_t last_ahead_ = 0;
  bool warm_ = false;      // a step has run, so that the ranks hold all their memory for the model
  bool stopping_ = false;  // a process wants to stop
};

// Finds the launcher that started this process and its place in the run, makes the world that pipeline.transport asks
// for, and runs program(world) in it: a Trainer of this world. Without a launcher, each replica has a thread; the first
// runs on the calling thread. If the program throws, all processes and replicas are aborted, and the first error in
// this process is rethrown. Throws Error if the number of processes does not fit the configuration, or its transport
// was not built in.
void run_world(const PipelineConfig& config, const std::function<void(World)>& program);

}  // namespace twobp
