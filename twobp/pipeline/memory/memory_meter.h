// Exact bytes of each stage. LibTorch reports every allocation and release of a tensor on a watched thread. The meter
// books it on the stage and category that the thread works for. It only counts memory. It does not see scratch space
// inside the math libraries.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/ATen.h>

#include "twobp/pipeline/observer.h"

namespace twobp {

class MemoryMeter {
 public:
  explicit MemoryMeter(std::vector<int> rank_of_stage);
  ~MemoryMeter();
  MemoryMeter(const MemoryMeter&) = delete;
  MemoryMeter& operator=(const MemoryMeter&) = delete;

  // While it lives, the meter sees allocations and releases of this thread. Memory that a watched thread allocated must
  // be released on a watched thread, or it stays on the books.
  class Watch {
   public:
    explicit Watch(const MemoryMeter& meter);
    ~Watch();

   private:
    friend class MemoryMeter;
    struct Guard;
    std::unique_ptr<Guard> guard_;
  };

  // The block cache calls it for what it reports to LibTorch, which reaches the meter unless a profiler records this
  // thread.
  static void report_beside_profiler(void* data, int64_t bytes);

  // While it lives, allocations of this thread are booked on `stage` and `category`.
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

  // Moves the tensor's memory to another stage and category, if it is on the books. For an activation that is handed on
  // or has become p2 stash.
  void rebook(const at::Tensor& tensor, int stage, MemoryCategory category);
  // The same for a message from elsewhere. It may not be on the books yet, or may be on another meter's, which is then
  // relieved of it.
  void book(const at::Tensor& tensor, int stage, MemoryCategory category);

  MemoryUse stage_use(int stage) const;
  MemoryUse rank_use(int rank) const;
  // Activations and stash that a rank holds now. Cheap: it is called before every layer.
  int64_t held(int rank) const;
  // The highest total of the rank since the previous call. The next peak starts from the current total.
  int64_t take_high_water(int rank);
  // Resets all peaks to the current totals.
  void reset_peaks();

 private:
  struct Books;
  std::shared_ptr<Books> books_;
};

}  // namespace twobp
