// A model cut into stages on the ranks of a world, ready to run schedules. What a trainer, a benchmark or a
// test drives. Every process of the world makes the same pipeline and makes the same calls in the same order;
// each holds the stages of its own ranks, on a thread for each.
#pragma once

#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "twobp/models/model.h"
#include "twobp/pipeline/memory/memory_meter.h"
#include "twobp/pipeline/observer.h"
#include "twobp/pipeline/profile/profile.h"
#include "twobp/pipeline/rank_threads.h"
#include "twobp/pipeline/step_input.h"
#include "twobp/pipeline/step_setup.h"
#include "twobp/schedule/schedule_source.h"
#include "twobp/transport/world.h"

namespace twobp {

class P2Offers;
class RankExecutor;
class Stage;

struct PipelineOptions {
  int stages = 2;
  std::vector<int> rank_of_stage;  // empty: one stage a rank
  std::vector<int> split;          // layers per stage; empty: by measured cost
  ThreadOptions threads;
  uint64_t seed = 1;     // of the initial weights
  double timeout = 300;  // seconds processes wait for each other here
};

// Worlds whose ranks are threads of this process, one a replica, for run_worlds. They compute on these
// devices (Device::open_for).
std::vector<World> make_thread_worlds(int replicas, int ranks, const ThreadOptions& threads,
                                      const std::vector<Device>& devices = {});

class Pipeline {
 public:
  // `profile` as measured for micro-batches of the size that will run.
  Pipeline(const ModelSpec& model, const Profile& profile, const PipelineOptions& options, World world);
  // All ranks in this process.
  Pipeline(const ModelSpec& model, const Profile& profile, const PipelineOptions& options);
  ~Pipeline();

  // One step over the micro-batches, which are as many as the setup is for. Rethrows the first error of any
  // rank after all ranks have stopped; the pipeline can't be used any more then. Loss, correct predictions
  // and `stop` are those of all processes; of ranks and stages, the run's first process has all of its
  // replica, the others their own.
  StepReport run(const StepSetup& setup, const std::vector<Fields>& micro_batches, const StepInput& input);
  // The same in two parts: every rank begins the step when it has ended the one before, whatever the others
  // do. Two steps can be under way at once, without events. The setup outlives the step.
  void submit(const StepSetup& setup, const std::vector<Fields>& micro_batches, const StepInput& input);
  // Waits for the oldest step under way.
  StepReport finish();
  // Waits for all, whose reports are lost. The first error among them that is not the echo of another rank's.
  std::exception_ptr drain() noexcept;
  // Ends what is under way here and in all processes, and this pipeline with it. Nothing if nothing is.
  void abandon(const std::string& reason) noexcept;
  int under_way() const { return static_cast<int>(under_way_.size()); }

  // A named schedule or a written one on this pipeline's stages.
  StepSetup setup(const ScheduleSource& schedule, int micro_batches, P2Policy policy,
                  P2Batching batching = P2Batching::kLoop,
                  MemoryCap memory_cap = MemoryCap::automatic()) const;
  StepSetup forward_setup(int micro_batches) const;

  // Runs body(rank) on the thread of every rank of this process.
  void on_ranks(const std::function<void(int)>& body);

  int stages() const { return static_cast<int>(split_.size()); }
  int ranks() const { return static_cast<int>(executors_.size()); }
  World& world() { return world_; }
  const World& world() const { return world_; }
  bool is_local(int rank) const { return world_.is_local(rank); }
  const std::vector<int>& split() const { return split_; }
  const std::vector<int>& rank_of_stage() const { return rank_of_stage_; }
  const ModelSpec& model() const { return model_; }
  const std::vector<std::vector<LayerProfile>>& stage_profiles() const { return stage_profiles_; }
  MemoryMeter& meter() { return *meter_; }
  // Of this process's ranks. Throw Error for others.
  RankExecutor& rank(int r);
  Stage& stage(int s);
  bool has_stage(int s) const { return is_local(rank_of_stage_.at(s)); }
  // Bytes of activations and stash each rank may hold under the setup; 0: no cap. With ranks in other
  // processes, the first call is made by all of them.
  std::vector<int64_t> caps(const StepSetup& setup) const;

 private:
  struct UnderWay;
  struct KeptGraph;

  std::shared_ptr<RankThreads::Job> post(std::function<void(int)> body);
  void wait(const RankThreads::Job& job);
  void abort(const std::string& reason);
  // Launches all ranks' instructions as one graph and returns their end. None: they are to be run one by one.
  std::optional<DeviceEvent> launch_graph(const StepInput& input);
  // After an error, when all ranks stand still.
  void forget_steps();

  // What the ranks hold besides activations and stash, all processes' together.
  std::vector<int64_t> fixed_bytes() const;
  // Sums and gathers over processes, and the idle time at both ends of the step.
  void complete(StepReport& report, const UnderWay& step);

  ModelSpec model_;
  std::vector<int> split_;
  std::vector<int> rank_of_stage_;
  std::vector<std::vector<LayerProfile>> stage_profiles_;
  std::unique_ptr<MemoryMeter> meter_;
  World world_;
  double timeout_;                            // of what processes agree on outside steps
  mutable std::vector<int64_t> known_fixed_;  // by rank; empty until the processes have told each other
  std::vector<double> clock_ahead_;           // by process of this replica, on the run's first: of its clock
  std::unique_ptr<P2Offers> offers_;
  std::unique_ptr<RankThreads> threads_;
  std::vector<std::unique_ptr<RankExecutor>> executors_;  // by rank; null: another process's
  std::deque<std::unique_ptr<UnderWay>> under_way_;       // oldest first
  std::unique_ptr<KeptGraph> graph_;
  std::vector<int64_t> caps_;      // of the step that began last
  bool fills_waits_ = false;       // likewise
  double last_end_ = 0;            // of the step that ended last
  std::vector<double> last_ends_;  // of that, by rank
  bool failed_ = false;
};

}  // namespace twobp
