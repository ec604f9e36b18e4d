// Failures on demand, to try out what a run does when something breaks: the environment variable TWOBP_FAIL,
// for instance "W:step=3:rank=1". For developers; unset, it costs nothing: no layer is wrapped.
//
//   TWOBP_FAIL=WHERE[:KEY=NUMBER]...
//     WHERE        F, I, W, optimizer, loader
//     step         counted from 1; this step, or for the loader the first read after it has begun (1)
//     rank         of the pipeline (0)
//     replica      (0)
//     micro_batch  index in the step, counted over all replicas, of F, I and W (any)
//     seconds      sleeps so long instead of throwing
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
  int64_t micro_batch = -1;  // any
  double seconds = 0;        // 0: throws
  std::string text;          // as it was written
};

// Throws Error: not of the form above.
Fault parse_fault(const std::string& text);

class FaultInjection {
 public:
  explicit FaultInjection(Fault fault);
  // Null unless TWOBP_FAIL is set.
  static std::shared_ptr<FaultInjection> from_environment();

  // Before the pipeline is made of them: layers and data that can fail.
  void wrap(ModelSpec& model);
  void wrap(DataSplit& data);
  // When it is known which layers the rank has.
  void choose_layers(const Pipeline& pipeline);

  void begin_step(int64_t step);
  void in_optimizer(int rank, int64_t step);

  // For the wrappers.
  bool is_due(Fault::Where where, int layer, const Context& context) const;
  bool is_due_in_loader() const { return loader_due_; }
  // Throws, or sleeps.
  void happen() const;

 private:
  Fault fault_;
  std::vector<std::atomic<bool>> layers_;  // by layer of the model: whether it is the rank's
  std::atomic<bool> here_ = false;         // this process runs the rank
  std::atomic<bool> loader_due_ = false;
};

}  // namespace twobp
