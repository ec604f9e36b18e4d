// A model cut into stages on the ranks of a world, ready to run schedules. Trainers, benchmarks and tests drive it.
// Every process of the world makes the same pipeline and the same calls in the same order. Each process holds the
// stages of its own ranks and runs each rank on a thread.
#pragma once

#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "twobp/models/model.h"
#include "twobp/pipeline/memory/memory_meter.h"
#include "twobp/pipeline/observer.h"
#include "twobp/pipeline/profile/by_size.h"
#include "twobp/pipeline/rank_threads.h"
#include "twobp/pipeline/step_plan.h"
#include "twobp/pipeline/step_request.h"
#include "twobp/schedule/schedule_source.h"
#include "twobp/transport/world.h"

namespace twobp {

class RankExecutor;
class Stage;

struct PipelineOptions {
  int stages = 2;
  std::vector<int> rank_of_stage;  // empty: one stage on each rank
  // Whether the first stage of each rank has frozen layers alone, before those of the schedule (after_frozen_stages).
  // The split is given then.
  bool frozen_stages = false;
  std::vector<int> split;  // layers per stage; empty: by measured cost
  SliceProfiles slices;    // the slices of a training step's sequences; no cuts: they are whole
  ThreadOptions threads;
  uint64_t seed = 1;     // of the initial weights
  double timeout = 300;  // seconds, of each wait for a message or another process
  // On devices: launches a whole training step as one graph (StepGraph). The graph is recorded when two steps in a row
  // have the same plan and sizes of micro-batches. Not used for steps with events. Steps throw Error if ranks are not
  // on devices of this process, if the device has no graphs, if another step is under way, or if there are gradients
  // already.
  bool graphs = false;
  int experts = 1;       // replicas that share the experts of each layer; the model's layers have this one's
  bool accounts = true;  // without, reports have no times, events and memory
  // Of the micro-batch that was measured. The bytes of others follow from it and from measurements of larger ones, and
  // automatic caps are those of the largest so far. None: all have this size.
  BatchSize measured{};
};

// One world for each replica, for run_worlds. Their ranks are threads of this process and compute on these devices
// (Device::open_for).
std::vector<World> make_thread_worlds(int replicas, int ranks, const ThreadOptions& threads,
                                      const std::vector<Device>& devices = {});

class Pipeline {
 public:
  // `profile` was measured with a micro-batch of the size PipelineOptions::measured. With slices, it is their sum.
  Pipeline(const ModelSpec& model, const Profile& profile, const PipelineOptions& options, World world);
  // All ranks in this process.
  Pipeline(const ModelSpec& model, const Profile& profile, const PipelineOptions& options);
  ~Pipeline();

  // Runs one step over the micro-batches. Their number is that of the plan. With slices, each is cut where `cuts` says,
  // or in proportion if its sequences are of another length. Rethrows the first error of any rank after all ranks have
  // stopped; then the pipeline can no longer be used. Loss, correct predictions and `stop` cover all processes. For
  // ranks and stages, the run's first process has those of its whole replica, and the others have their own.
  StepReport run(const StepPlan& plan, const std::vector<Fields>& micro_batches, const StepRequest& request);
  // run() in two parts: submit() starts a step, and finish() waits for it. Every rank begins the step when it has ended
  // the previous one, whatever the other ranks do. Two steps can be under way at once, without events.
  void submit(const StepPlan& plan, const std::vector<Fields>& micro_batches, const StepRequest& request);
  // Waits for the oldest step under way and returns its report. `numbers` (float64) become their sums over
  // processes: a step has one Exchange.
  StepReport finish(const std::vector<at::Tensor>& numbers = {});
  // Waits for all steps and drops their reports. Returns the first error that is not the echo of another rank's.
  std::exception_ptr drain() noexcept;
  // Aborts the steps under way in all processes. Then this pipeline can no longer be used. Does nothing if no step is
  // under way.
  void abandon(const std::string& reason) noexcept;
  // Drops what was computed ahead of the next step, because weights or programs of frozen stages change.
  void forget_next() { next_.reset(); }
  int under_way() const { return static_cast<int>(under_way_.size()); }

  // The plan of training steps by a named schedule or a written one, on this pipeline's stages. If there are several
  // processes, all of them make the first plan together. Automatic caps are those for what the ranks hold now, apart
  // from micro-batches; a step for which that has changed makes them anew.
  StepPlan plan(const ScheduleSource& schedule, int micro_batches, P2Policy policy,
                const StepOptions& options = {}) const;
  // The same for a schedule that is ready to run. `standard`: the basis of an automatic cap.
  StepPlan plan(Schedule schedule, const StepOptions& options,
                std::shared_ptr<const Schedule> standard = nullptr) const;
  // The plan of an evaluation.
  StepPlan forward_plan(int micro_batches) const;

  // From the next plan on, these stages stream their gradients in steps with an update: W waits for the end of the
  // stage's I and then runs layer by layer, and each gradient is applied and freed as soon as it is complete. So a
  // stage's gradients need the memory of one layer's. Call it before the first step. Empty: none.
  void stream_gradients(const std::vector<bool>& stages);
  bool streams_gradients() const { return !streams_.empty(); }

  // Runs body(rank) on the thread of every rank of this process. It may change weights, so it calls forget_next().
  void on_ranks(const std::function<void(int)>& body);

  int stages() const { return static_cast<int>(split_.size()); }
  int ranks() const { return static_cast<int>(executors_.size()); }
  World& world() { return world_; }
  const World& world() const { return world_; }
  bool is_local(int rank) const { return world_.is_local(rank); }
  const std::vector<int>& split() const { return split_; }
  const std::vector<int>& rank_of_stage() const { return rank_of_stage_; }
  // The number of stages before those of a named schedule: see PipelineOptions::frozen_stages.
  int frozen_stages() const { return frozen_stages_ ? ranks() : 0; }
  const ModelSpec& model() const { return model_; }
  // The costs of the layers of each stage; with slices, of each slice and stage, slice by slice.
  const StagesOfLayers& layer_costs() const { return layer_costs_; }
  // The same with the bytes of micro-batches of another size.
  StagesOfLayers layer_costs(const BatchSize& size) const;
  int slices() const { return slices_.count(); }
  const Cuts& cuts() const { return slices_.cuts; }
  MemoryMeter& meter() { return *meter_; }
  // Bytes of each rank apart from activations and stash. If there are several processes, all of them make the first
  // call together.
  std::vector<int64_t> fixed_bytes() const;
  // For ranks and stages of this process. Throw Error for others.
  RankExecutor& rank(int r);
  Stage& stage(int s);
  bool has_stage(int s) const { return is_local(rank_of_stage_.at(s)); }

 private:
  struct UnderWay;
  struct KeptGraph;

  std::shared_ptr<RankThreads::Job> post(std::function<void(int)> body);
  void wait(const RankThreads::Job& job);
  void abort(const std::string& reason);
  // Launches all ranks' instructions as one graph and returns its end. None: the instructions must run one by one.
  std::optional<DeviceEvent> launch_graph(const UnderWay& step);
  void check_graph(const UnderWay& step) const;
  // Throws Error if the step cannot run.
  void check_step(const StepPlan& plan, const std::vector<Fields>& micro_batches, const StepRequest& request) const;
  StepBatch in_parts(const std::vector<Fields>& micro_batches, int slices);
  std::shared_ptr<const StagesOfLayers> costs_of(BatchSize size);
  // Finds out whether the step before knew this batch, and tells the ranks what is known of the next one.
  void look_ahead(UnderWay& step);
  // Takes note of the largest micro-batch, rounded up, so that few plans are made. Measures the bytes of one that is
  // much larger than those before.
  void note_sizes(const std::vector<Fields>& micro_batches);
  // The plan that a step runs by: that of the step under way if it is the same, else renewed.
  std::shared_ptr<const StepPlan> current(const StepPlan& plan);
  // With other processes, compares the order in which ranks send what their peers expect. Throws Error that names both
  // ranks and the first message that differs.
  void agree_on_messages(const Schedule& schedule);
  // The plan for what the ranks hold now. They must be idle.
  std::shared_ptr<const StepPlan> renewed(const StepPlan& plan);
  void add_caps(StepPlan& plan) const;
  // StepPlan::ahead of a plan with caps.
  int forwards_ahead(const StepPlan& plan) const;
  // The automatic caps of the plan, whose `fixed` and `standard_peaks` are known.
  std::vector<int64_t> automatic_caps(const StepPlan& plan, const StagesOfLayers& costs) const;
  // After an error, when all ranks have stopped.
  void forget_steps();

  // The report of this process's ranks.
  StepReport report_of(UnderWay& step) const;
  // Completes the report: sums and gathers over processes, adds the idle time at both ends of the step.
  void complete(StepReport& report, const UnderWay& step, const std::vector<at::Tensor>& numbers);

  ModelSpec model_;
  std::vector<int> split_;
  std::vector<int> rank_of_stage_;
  bool frozen_stages_;
  SliceProfiles slices_;
  StagesOfLayers layer_costs_;
  std::unique_ptr<MemoryMeter> meter_;
  World world_;
  double timeout_;
  bool graphs_;
  bool accounts_;
  std::vector<bool> streams_;  // by stage; empty: none
  ProfilesBySize by_size_;
  BatchSize largest_;  // by its bytes, so far
  // By the size of recent micro-batches.
  std::map<std::pair<double, double>, std::shared_ptr<const StagesOfLayers>> costs_;
  mutable std::vector<int64_t> known_fixed_;  // by rank; empty until the processes have exchanged them
  std::vector<double> clock_ahead_;  // by process of this replica, on the run's first process: its clock's lead
  std::unique_ptr<RankThreads> threads_;
  std::vector<std::unique_ptr<Transport>> experts_;          // by rank: its group; empty: each replica has all
  std::vector<std::pair<int, ExpertTokens>> expert_layers_;  // by layer of the model, without tokens
  std::vector<std::unique_ptr<RankExecutor>> executors_;     // by rank; null: in another process
  std::deque<std::unique_ptr<UnderWay>> under_way_;          // oldest first
  std::shared_ptr<const NextBatch> next_;                    // known to the newest of them
  std::unique_ptr<KeptGraph> graph_;
  std::vector<std::shared_ptr<const StepPlan>> renewed_;  // one for each of the caller's plans
  double last_end_ = 0;                                   // of the step that ended last
  std::vector<double> last_ends_;                         // of the same step, by rank
  bool failed_ = false;
};

}  // namespace twobp
