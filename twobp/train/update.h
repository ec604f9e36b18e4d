// The end of a training step, run by every rank on its own thread: gradients of tied weights summed, the
// global norm, clipping, the optimizer. Sums are taken in model order, so that the bits do not depend on the
// stage count.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "twobp/pipeline/pipeline.h"
#include "twobp/train/optimizer.h"

namespace twobp {

// A tensor that a checkpoint holds, on one of the ranks that hold it. Packed weights come as their parts.
struct LiveTensor {
  std::string name;   // the part's; for optimizer state with ".exp_avg" and so on behind it
  at::Tensor tensor;  // shares memory with the one in use
  int rank = 0;
  bool first = true;  // of the places that hold it, all of which are the same
  bool frozen = false;
};

class Update {
 public:
  // Finds the tied weights (parameters of one name), gives uses on one rank one value tensor, and allocates
  // the optimizer state on the rank threads.
  Update(Pipeline& pipeline, const OptimizerConfig& config, double clip_norm, double timeout);

  // For StepOptions::finish. With clipping every rank waits for the norm; without, the norm is only reported.
  // Returns the seconds the rank was busy. Throws Error on every rank if a gradient is not finite, naming the
  // layer whose weight is not, or else the one where the backward pass met it first.
  // With a gradient scale (the factor that all gradients carry), the step is skipped instead.
  double run(int rank, int64_t step, double lr, double gradient_scale = 1);

  // Global gradient norm of the last step, before clipping.
  double grad_norm() const { return grad_norm_; }
  // Whether the last step was skipped since a scaled gradient was not finite.
  bool skipped() const { return skipped_; }

  // Every weight once, in model order: what is saved.
  const std::vector<Parameter*>& weights() const { return weights_; }

  // Everything that a run of steps changes, for checkpoints: as masters, in model order, and the optimizers'.
  std::vector<LiveTensor> live_weights() const;
  std::vector<LiveTensor> live_optimizer_state() const;
  int64_t optimizer_steps() const { return optimizers_.front()->steps(); }
  // After the live tensors were written to, on every rank's thread.
  void restored(int rank, int64_t optimizer_steps);

 private:
  struct Use {
    Parameter* parameter = nullptr;
    int layer = 0;  // in the model
    int stage = 0;
    int rank = 0;
  };
  // Uses of one weight in model order; more than one if it is tied.
  using Uses = std::vector<Use>;

  // Returns the seconds spent waiting.
  double sum_tied(int rank, int64_t step);
  double reduce_norm(int rank, at::Tensor& squares, double gradient_scale, double& norm);
  // Collective: all ranks have the same `squares`.
  [[noreturn]] void fail_not_finite(int rank, const at::Tensor& squares, int64_t step);

  Pipeline& pipeline_;
  double clip_norm_;
  double timeout_;
  std::vector<Uses> all_;  // in order of the first use
  std::vector<Parameter*> weights_;
  std::vector<std::unique_ptr<Optimizer>> optimizers_;  // by rank
  double grad_norm_ = 0;                                // written by rank 0
  bool skipped_ = false;                                // by rank 0 too
};

}  // namespace twobp
