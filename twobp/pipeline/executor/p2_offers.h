// Weight gradients that ranks take off each other at the end of a step: a rank that has ended its own part
// runs some of what others have left of theirs (work stealing). For ranks that are threads of one process, on
// CPUs.
//
// Of a leaf layer one unit runs at a time, oldest first, so that its gradient is the same sum in the same
// order, to the bit, whoever adds what.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "twobp/nn/kernels/products/product_time.h"
#include "twobp/nn/layer.h"

namespace twobp {

struct OfferedP2 {
  P2Unit unit;
  int stage = 0;
  int local_stage = 0;  // counted among those of its rank
};

class P2Offers {
 public:
  explicit P2Offers(int ranks) : offers_(ranks) {}

  struct Spent {
    double seconds = 0;
    ProductTime products;
  };
  using Run = std::function<Spent(const OfferedP2&)>;

  // While no rank is in a step.
  void begin_step();

  // Once a step by every rank, with all that it has left, oldest first; returns when that has been run, by
  // `run` here and by others' in help(). Rethrows the error of a unit wherever it ran. `largest`: bytes that
  // a unit may need meanwhile.
  struct Outcome {
    double waited = 0;          // seconds
    std::vector<Spent> helped;  // what others have spent, by local stage
  };
  Outcome run_own(int rank, const std::vector<OfferedP2>& units, int64_t largest, const Run& run,
                  double timeout);

  // Then: runs what others have left, until there will be no more in this step. `has_room(owner, bytes)`:
  // whether that rank may hold so many more, for what runs of its units and one beside it. Returns the
  // seconds waited.
  using HasRoom = std::function<bool(int owner, int64_t bytes)>;
  double help(int rank, const HasRoom& has_room, const Run& run, double timeout);

  // Whoever waits here, or would, throws Aborted; nobody begins a unit any more.
  void abort(const std::string& reason);

 private:
  // One leaf's, in micro-batch order.
  struct Leaf {
    int64_t work = 0;  // of a unit
    std::deque<OfferedP2> units;
    bool busy = false;

    int64_t left() const { return work * static_cast<int64_t>(units.size()); }
  };
  struct Offer {
    bool made = false;
    std::vector<Leaf> leaves;
    size_t left = 0;  // units that have not been run
    int64_t running = 0;
    int64_t largest = 0;
    std::vector<Spent> helped;
    std::exception_ptr error;  // of a unit: no other begins
  };

  // Of the leaves that nobody is at the one with most left, so that what is left in the end is small; of
  // equals the first, or the last. Null: none.
  static Leaf* next(Offer& offer, bool first);
  bool more_may_come() const;
  // Runs the leaf's oldest unit with the lock released. Nothing if it failed: the offer has the error.
  std::optional<Spent> run_next(std::unique_lock<std::mutex>& lock, Offer& offer, Leaf& leaf, const Run& run);
  // Until anything changes; the seconds it took.
  double wait(std::unique_lock<std::mutex>& lock, int rank, double timeout);
  void throw_if_aborted() const;

  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t changes_ = 0;        // how often `changed_` was notified, but for the end
  std::vector<Offer> offers_;  // by rank
  bool aborted_ = false;
  std::string reason_;
};

}  // namespace twobp
