// Failures on demand, to test what a run does when something breaks. The environment variable TWOBP_FAIL sets them, for
// instance "W:step=3:rank=1". For developers. If it is unset, there is no cost, because no layer is wrapped.
//
//   TWOBP_FAIL=WHERE[:KEY=NUMBER]...
//     WHERE        F, I, W, optimizer, loader
//     step         counted from 1; this step, or for the loader the first read after it has begun (1)
//     rank         of the pipeline (0)
//     replica      (0)
//     micro_batch  of F, I and W: index in the step, counted over all replicas (any)
//     layer        likewise: index in the model (any)
//     seconds      sleeps this long instead of throwing
//     kill         1: kills the process (SIGKILL) instead of throwing
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "twobp/data/data.h"
#include "twobp/models/model.h"

namespace twobp {

class Pipeline;

struct Fault {
  enum class Where : uint8_t { kForward, kBackwardP1, kBackwardP2, kOptimizer, kLoader };

  Where where = Where::kForward;
  int64_t step = 1;
  int64_t rank = 0;
  int64_t replica = 0;
  int64_t micro_batch = -1;  // -1: any
  int64_t layer = -1;        // likewise
  double seconds = 0;        // 0: throws
  int64_t kill = 0;
  std::string text;  // the original text
};

// Throws Error if the text does not have the form above.
Fault parse_fault(const std::string& text);

class FaultInjection {
 public:
  explicit FaultInjection(Fault fault);
  // Null unless TWOBP_FAIL is set.
  static std::shared_ptr<FaultInjection> from_environment();

  // Called before the pipeline is made: wraps layers and data that can fail.
  void wrap(ModelSpec& model);
  void wrap(DataSplit& data);
  // Called when the rank's layers are known.
  void choose_layers(const Pipeline& pipeline);

  void begin_step(int64_t step);
  void in_optimizer(int rank, int64_t step);

  // Called by the wrapped layers and data: whether they must fail now.
  bool is_due(Fault::Where where, int layer, const Context& context) const;
  bool is_due_in_loader() const { return loader_due_; }
  // Throws, sleeps, or kills the process.
  void happen() const;

 private:
  Fault fault_;
  std::vector<std::atomic<bool>> layers_;  // by layer of the model: whether the rank has it
  std::atomic<bool> here_ = false;         // whether this process runs the rank
  std::atomic<bool> loader_due_ = false;
};

}  // namespace twobp
