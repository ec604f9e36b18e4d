// Work stealing of weight gradients at the end of a step: a rank that has finished its own part runs some of
// the W that others have left. For ranks that are threads of one process, on CPUs.
//
// A leaf layer has one unit running at a time, oldest first. So its gradient is the same sum in the same
// order, to the bit, whichever rank adds a term.
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
  int local_stage = 0;                 // index among the stages of its rank
  const std::string* layer = nullptr;  // its name, for messages
  int micro_batch = 0;
};

class P2Offers {
 public:
  explicit P2Offers(int ranks) : offers_(ranks) {}

  struct Spent {
    double seconds = 0;
    ProductTime products;
  };
  using Run = std::function<Spent(const OfferedP2&)>;

  // Call while no rank is in a step.
  void begin_step();

  // Every rank calls this once in a step, with all the W that it has left, oldest first. Returns when all of
  // it has run, either through `run` here or on other ranks in help(). Rethrows the error of a unit, wherever
  // it ran. `largest`: bytes that a unit may need while it runs.
  struct Outcome {
    double waited = 0;          // seconds
    std::vector<Spent> helped;  // time spent by other ranks, by local stage
  };
  Outcome run_own(int rank, const std::vector<OfferedP2>& units, int64_t largest, const Run& run,
                  double timeout);

  // After run_own: runs W that other ranks have left, until no more can come in this step. `has_room(owner,
  // bytes)`: whether rank `owner` may hold that many more bytes, for its units that run now and one more.
  // Returns the seconds waited.
  using HasRoom = std::function<bool(int owner, int64_t bytes)>;
  double help(int rank, const HasRoom& has_room, const Run& run, double timeout);

  // Every current and later wait throws Aborted. No unit begins any more.
  void abort(const std::string& reason);

 private:
  // The units of one leaf, in micro-batch order.
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
    std::exception_ptr error;  // of a unit; after it no other unit begins
  };

  // Among the leaves that nobody works on, the one with the most work left, so that little is left in the
  // end. Of equal leaves the first if `first`, else the last. Null: none.
  static Leaf* next(Offer& offer, bool first);
  bool more_may_come() const;
  // Runs the leaf's oldest unit, with the lock released. Returns nothing if it failed; the offer then has the
  // error.
  std::optional<Spent> run_next(std::unique_lock<std::mutex>& lock, Offer& offer, Leaf& leaf, const Run& run);
  // Waits until anything changes. Returns the seconds it took.
  double wait(std::unique_lock<std::mutex>& lock, int rank, double timeout);
  void throw_if_aborted() const;

  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t changes_ = 0;        // how often `changed_` was notified, except by abort()
  std::vector<Offer> offers_;  // by rank
  bool aborted_ = false;
  std::string reason_;
};

}  // namespace twobp
