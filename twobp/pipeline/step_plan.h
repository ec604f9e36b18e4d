// What a step does, apart from its batch: the order of each rank's instructions, where W runs, and the bytes that ranks
// may hold. Nothing in it changes during a step (Pipeline::plan).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "twobp/pipeline/profile/by_size.h"
#include "twobp/schedule/check/walk.h"
#include "twobp/schedule/schedule.h"
#include "twobp/schedule/schedule_source.h"

namespace twobp {

// The byte cap: the most bytes of activations and stash that a rank may hold. To stay below, it runs old W first.

// A number of bytes, the same for every rank, or automatic. The automatic cap is the total that standard
// backpropagation needs on its fullest rank, times a factor, less the rank's own parameters, gradients and optimizer
// state.
class MemoryCap {
 public:
  constexpr MemoryCap(int64_t bytes)  // NOLINT(google-explicit-constructor): a cap is a number of bytes
      : MemoryCap(bytes, 0) {}
  static constexpr MemoryCap none() { return {0, 0}; }
  static constexpr MemoryCap automatic(double times = 1) { return {0, times}; }

  bool is_automatic() const { return times_ > 0; }
  int64_t bytes() const { return bytes_; }  // 0 if automatic
  double times() const { return times_; }   // 0 unless automatic
  bool operator==(const MemoryCap&) const = default;

 private:
  constexpr MemoryCap(int64_t bytes, double times) : bytes_(bytes), times_(times) {}

  int64_t bytes_;
  double times_;
};

// As in pipeline.memory_cap: "auto", "1.05x", "1000000".
inline std::ostream& operator<<(std::ostream& out, const MemoryCap& cap) {
  if (!cap.is_automatic()) return out << cap.bytes();
  if (cap.times() == 1) return out << "auto";
  return out << cap.times() << 'x';
}

// pipeline.memory_cap: "auto", "1.05x" -> MemoryCap::automatic(); "0" -> no cap; "512MiB", "1000000" -> bytes. Throws
// Error otherwise.
MemoryCap parse_memory_cap(const std::string& text);
// pipeline.bucket: "25MiB", "1000000" -> bytes, at least 1. Throws Error otherwise.
int64_t parse_bucket(const std::string& text);

// How pending W of one layer runs if several micro-batches are due together.
enum class P2Batching : uint8_t {
  kLoop,    // one call each
  kConcat,  // one call, which gathers their rows by copying (nn/kernels/products/rows.h)
};
std::string_view batching_name(P2Batching batching);
// Throws Error, which suggests the nearest name.
P2Batching parse_batching(std::string_view name);
std::vector<std::string> batching_names();

// How W runs, and what ranks may hold. It changes no bit of the results.
struct StepOptions {
  P2Batching batching = P2Batching::kLoop;
  MemoryCap memory_cap = MemoryCap::automatic();
  P2Order p2_order = P2Order::kOldest;  // of the W that is left at the end
  // The schedule whose peaks with p2 off are the basis of the automatic cap (see auto_caps). None: the plan's own.
  std::optional<ScheduleSource> standard{};
  bool operator==(const StepOptions&) const = default;
};

struct StepPlan {
  Schedule schedule;
  StepOptions options;
  LeadingForwards leading;    // of the schedule
  std::vector<int64_t> caps;  // by rank: bytes of activations and stash; 0: no cap
  // Whether a rank runs W while it waits. On devices, the waits are those of the simulated step (w_places), because the
  // host runs ahead of them.
  bool fills_waits = false;
  std::vector<std::vector<int>> w_places;  // see simulate/for_training.h; empty: not on devices, or no wait runs W
  std::vector<int64_t> fixed;              // by rank: bytes of parameters, gradients and optimizer, for which caps hold
  std::shared_ptr<const Schedule> standard;  // the basis of the caps; null: they are not automatic
  std::vector<int64_t> standard_peaks;       // its bytes of activations, by rank
  BatchSize largest;                         // of micro-batches, for which caps and peaks hold
  std::vector<double> largest_w;             // by rank: bytes that the W of some layer needs while it runs
  // F of frozen stages that run in the step before, if that knows the batch (SimulationOptions::ahead).
  int ahead = 0;
  // By stage: whether its gradients are streamed (Pipeline::stream_gradients). Empty: none.
  std::vector<bool> streams;

  int64_t cap(int rank) const { return caps.empty() ? 0 : caps[rank]; }
};

struct SimulationOptions;
// For simulating the plan, without a timeline.
SimulationOptions simulation_of(const StepPlan& plan);

}  // namespace twobp
