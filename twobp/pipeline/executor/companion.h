// A second stack for a rank, so that two of its F or I may be under way. It is a thread's, but the two threads take
// turns: one runs while the other waits to be given the turn. So what only the rank's thread may use, such as its
// transports, serves both.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "twobp/core/wait.h"
#include "twobp/nn/kernels/products/product_time.h"
#include "twobp/pipeline/memory/memory_meter.h"

namespace at {
class ThreadLocalState;
}  // namespace at

namespace twobp {

class Companion {
 public:
  // Call it on the rank's thread, whose cores, number of compute threads and kept memory it has.
  explicit Companion(const MemoryMeter& meter);
  ~Companion();
  Companion(const Companion&) = delete;
  Companion& operator=(const Companion&) = delete;

  // On the rank's thread: these return when the work yields, or has ended. Throw Aborted if it failed (failure()).
  void begin(std::function<void()> work);
  void go_on();
  // Whether work is under way.
  bool busy() const { return busy_; }
  // What it has yielded for. Null: something that the rank knows.
  Wait* awaits() const { return awaits_; }
  std::exception_ptr failure() const { return failure_; }
  // Ends work that is under way.
  void end();

  // Whether this is the work's stack.
  bool is_here() const { return std::this_thread::get_id() == thread_.get_id(); }
  // Within the work: gives the turn to the rank. Throws Aborted if the work is to end.
  void yield(Wait* awaits);

 private:
  void run();
  void do_work();
  void pass_turn(bool to_companion);
  void wait_for_turn(bool of_companion);

  const MemoryMeter& meter_;
  std::mutex mutex_;
  std::condition_variable passed_;
  bool companions_turn_ = false;  // else the rank's
  std::function<void()> work_;    // none, when it is the companion's turn: the thread ends
  std::unique_ptr<const at::ThreadLocalState> state_;
  bool busy_ = false;
  bool ends_ = false;
  Wait* awaits_ = nullptr;
  std::exception_ptr failure_;
  ProductTime products_;  // of the companion, up to its last turn
  std::thread thread_;
};

}  // namespace twobp
