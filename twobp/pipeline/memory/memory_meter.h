// Exact bytes per stage: every tensor allocation and release on a watched thread is reported by LibTorch and
// booked on the stage and category that the thread was working for. Memory is not touched, only counted;
// scratch space inside the math libraries is not seen.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include <ATen/ATen.h>

namespace twobp {

enum class MemoryCategory : int { kParameters, kGradients, kOptimizer, kActivations, kStash };
inline constexpr int kMemoryCategories = 5;
// "parameters", "gradients", "optimizer", "activations", "p2 stash"
std::string_view category_name(MemoryCategory category);

struct MemoryUse {
  std::array<int64_t, kMemoryCategories> now{};      // bytes, by MemoryCategory
  std::array<int64_t, kMemoryCategories> at_peak{};  // the split at the moment of the highest total
  int64_t peak = 0;

  int64_t total() const;
  int64_t held() const {  // what micro-batches hold, in contrast to the model's own
    return now[static_cast<int>(MemoryCategory::kActivations)] +
           now[static_cast<int>(MemoryCategory::kStash)];
  }
};

class MemoryMeter {
 public:
  explicit MemoryMeter(std::vector<int> rank_of_stage);
  ~MemoryMeter();
  MemoryMeter(const MemoryMeter&) = delete;
  MemoryMeter& operator=(const MemoryMeter&) = delete;

  // While it lives, allocations and releases of this thread are seen. What a watched thread allocated must be
  // released on a watched thread, or it stays on the books.
  class Watch {
   public:
    explicit Watch(const MemoryMeter& meter);
    ~Watch();

   private:
    struct Guard;
    std::unique_ptr<Guard> guard_;
  };

  // While it lives, this thread's allocations are booked on `stage` and `category`.
  class Scope {
   public:
    Scope(int stage, MemoryCategory category);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    int stage_;
    MemoryCategory category_;
  };

  // Books the tensor's memory anew, if it is on the books: an activation that is handed on, or has become p2
  // stash.
  void rebook(const at::Tensor& tensor, int stage, MemoryCategory category);
  // The same of a message from elsewhere, which may not be on the books yet, or on another meter's: it comes
  // off those.
  void book(const at::Tensor& tensor, int stage, MemoryCategory category);

  MemoryUse stage_use(int stage) const;
  MemoryUse rank_use(int rank) const;
  // Activations and stash of a rank now: cheap, called before every layer.
  int64_t held(int rank) const;
  // The highest rank total since the last call of this kind; starts anew from now.
  int64_t take_high_water(int rank);
  // Peaks start anew from what is there now.
  void reset_peaks();

 private:
  struct Books;
  std::shared_ptr<Books> books_;
};

}  // namespace twobp
