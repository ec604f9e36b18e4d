// How a run of one or many processes ends when something fails: one report, by the process where it failed
// first; the others told, and gone within seconds, whatever they hang in.
#pragma once

#include <memory>
#include <string>

#include "twobp/transport/launcher.h"
#include "twobp/transport/world.h"

namespace twobp {

inline constexpr int kFailed = 1;
inline constexpr int kOtherFailed = 3;  // stopped since another process did

// For the whole program; members may be called from any thread.
class RunGuard {
 public:
  static RunGuard& get();

  // Who this process is, for reports and for who waits for whom.
  void started_by(const Launcher& launcher) { launcher_ = launcher; }

  // From now on the world's aborts start the clock of failing().
  void watch(World& world);
  // Call where the exception at hand was caught first. Unless it is because of another process, this one has
  // failed and must be gone in a few seconds: if its threads don't end by then, it reports and ends without
  // them.
  void failing();

  // For a wait on other processes that has no time-out of its own: unless this is destroyed within `seconds`,
  // the process fails. `what`: "starting the run".
  class Deadline {
   public:
    Deadline(double seconds, std::string what);
    ~Deadline();
    Deadline(const Deadline&) = delete;
    Deadline& operator=(const Deadline&) = delete;

   private:
    struct State;
    std::shared_ptr<State> state_;
  };

  // The end of a program that failed by itself, or since another process did; the exception at hand says
  // which. Prints and returns the exit code; with other processes, ends them all and does not return.
  int end_failed();

 private:
  void report(const std::string& what);

  Launcher launcher_;
};

}  // namespace twobp
