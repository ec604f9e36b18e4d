// A model cut into stages on rank threads of this process, ready to run schedules. What a trainer, a
// benchmark or a test drives.
#pragma once

#include <memory>
#include <vector>

#include "twobp/pipeline/byte_cap.h"
#include "twobp/pipeline/rank_executor.h"
#include "twobp/pipeline/rank_threads.h"
#include "twobp/plan/partition.h"
#include "twobp/schedule/schedule_source.h"

namespace twobp {

inline constexpr int64_t kAutoCap = -1;

struct PipelineOptions {
  int stages = 2;
  std::vector<int> rank_of_stage;  // empty: one stage a rank
  std::vector<int> split;          // layers per stage; empty: by measured cost
  ThreadOptions threads;
  uint64_t seed = 1;  // of the initial weights
};

// A schedule with what the executor needs to know beside it.
struct Plan {
  Schedule schedule;
  P2Batching batching = P2Batching::kLoop;
  int64_t memory_cap = kAutoCap;  // bytes per rank; 0: none
  int slab_slots = 0;
  std::vector<int64_t> standard_peaks;  // by rank, for the automatic cap
};

struct StepOptions {
  uint64_t seed = 0;
  int64_t step = 0;
  bool training = true;
  double loss_scale = 1;  // see Context
  double gradient_scale = 1;
  double timeout = 300;  // seconds
  bool want_events = false;
  std::function<double(int rank)> finish;  // see StepInput
};

class Pipeline {
 public:
  // `profile` as measured for micro-batches of the size that will run.
  Pipeline(const ModelSpec& model, const Profile& profile, const PipelineOptions& options);
  ~Pipeline();

  // One step over the micro-batches; at most plan.schedule.micro_batches of them. Rethrows the first error of
  // any rank after all ranks have stopped; the pipeline can't be used any more then.
  StepReport run(const Plan& plan, const std::vector<Fields>& micro_batches, const StepOptions& options);

  // A named schedule or a written one on this pipeline's stages.
  Plan plan(const ScheduleSource& schedule, int micro_batches, P2Policy policy,
            P2Batching batching = P2Batching::kLoop, int64_t memory_cap = kAutoCap) const;
  Plan forward_plan(int micro_batches) const;

  // Runs body(rank) on every rank's thread.
  void on_ranks(const std::function<void(int)>& body);

  int stages() const { return static_cast<int>(split_.size()); }
  int ranks() const { return static_cast<int>(executors_.size()); }
  const std::vector<int>& split() const { return split_; }
  const std::vector<int>& rank_of_stage() const { return rank_of_stage_; }
  const ModelSpec& model() const { return model_; }
  const std::vector<std::vector<LayerCost>>& stage_costs() const { return stage_costs_; }
  MemoryMeter& meter() { return *meter_; }
  RankExecutor& rank(int r) { return *executors_[r]; }
  Stage& stage(int s);
  // Bytes of activations and stash each rank may hold under the plan; 0: no cap.
  std::vector<int64_t> caps(const Plan& plan) const;

 private:
  ModelSpec model_;
  std::vector<int> split_;
  std::vector<int> rank_of_stage_;
  std::vector<std::vector<LayerCost>> stage_costs_;
  std::unique_ptr<MemoryMeter> meter_;
  std::vector<std::unique_ptr<Transport>> transports_;
  std::unique_ptr<RankThreads> threads_;
  std::vector<std::unique_ptr<RankExecutor>> executors_;
  bool failed_ = false;
};

}  // namespace twobp
