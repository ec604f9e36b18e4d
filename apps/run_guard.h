// What ends a run of one or many processes: signals, and failures. The process that failed first reports it,
// once. The others are told, and end within seconds, even if they hang.
//
// Signals that ask a training run to end in a state from which it can resume: Ctrl-C, SIGTERM from a
// scheduler, SIGHUP from a terminal that closes, SIGXCPU at a limit of time, and SIGPIPE when the reader of
// the output has gone.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include "twobp/transport/processes.h"
#include "twobp/transport/start.h"
#include "twobp/transport/world.h"

namespace twobp {

inline constexpr int kFailed = 1;
inline constexpr int kOtherFailed = 3;  // stopped because another process failed

// There is one for the whole program. Any thread may call its members.
class RunGuard {
 public:
  static RunGuard& get();

  // Tells which process this is, for reports and for the order of waits.
  void started_by(const Launcher& launcher) { launcher_ = launcher; }

  // From now on, an abort of the world because of an exception calls failing(). `timeout` is
  // pipeline.timeout.
  void watch(World& world, double timeout);
  // Call where the current exception was caught first. Does nothing if another process caused it. Otherwise
  // this process has failed and must end in a few seconds. If its threads have not ended by then, it reports
  // and ends without them.
  void failing();

  // Limits a wait for other processes that has no time-out of its own. The process fails unless this object
  // is destroyed within `seconds`. `what` describes the wait, such as "starting the run".
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

  // Ends a program that failed by itself or because another process did. The current exception tells which.
  // Prints and returns the exit code. With other processes, ends them all and does not return.
  int end_failed();

 private:
  void report(const std::string& what);
  // Another process failed before this one, and reports.
  void failed_later(const std::string& what);
  std::string other_failure();
  [[noreturn]] void end_by_other(const std::string& what);

  Launcher launcher_;
  std::atomic<double> timeout_{0};  // replicas begin to watch at the same time
  std::mutex mutex_;
  std::string other_failure_;
};

// From now on, a signal is only noted. A second request ends the program at once. It is a second Ctrl-C, or
// another signal at least half a second after the first one. SIGHUP stays ignored under nohup.
void catch_stop_signals();
// From now on, any signal ends the program again, because nothing is left to save.
void forget_stop_signals();

// Returns the first signal that this process has received, or 0.
int stop_signal();

// Call when all processes know that the run stops. Returns the signal that stops it, the same on all of them.
int agreed_stop_signal(const Processes& processes);

// Returns a text such as "stopped by SIGTERM".
std::string how_it_stops(int signal);
// Returns the shell's exit code for a program that the signal ended, or 0 without a signal.
int exit_code_of_signal(int signal);

}  // namespace twobp
