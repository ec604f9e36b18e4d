#include "apps/run_guard.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <unistd.h>

#include "apps/print.h"
#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/nn/thrown.h"
#include "twobp/transport/mpi/mpi.h"
#include "twobp/transport/transport.h"

namespace twobp {
namespace {

// If all processes fail in the same way, the first one reports. It ends the others before they report.
constexpr double kFirstReports = 0.8;
// This is the time for the others to receive the reason before they are killed.
constexpr double kLastWords = 0.2;
// If a process stops because another failed, the other one ends it. Otherwise it ends by itself after this
// time.
constexpr double kEndedByOther = 3;
// This is the time for destructors, which may wait for a stuck thread or for the end of a checkpoint. A
// process that runs alone may take longer, up to pipeline.timeout, because no other process waits for it.
constexpr double kUnwind = 2;
constexpr double kUnwindAlone = 10;
// This is the time for MPI to end the run.
constexpr double kLastResort = 1;

void sleep_for(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

std::string host_name() {
  char name[256] = "";
  ::gethostname(name, sizeof(name) - 1);
  return name;
}

struct Thrown {
  std::string what;
  bool by_other = false;  // another process failed first
};

Thrown what_is_thrown() {
  try {
    throw;
  } catch (const Aborted& e) {
    return {e.what(), true};
  } catch (...) {
    return {message_of_thrown()};
  }
}

// Ends all processes. Ends this one even if MPI hangs while it does so.
[[noreturn]] void end_now(int code) {
  std::thread([code] {
    sleep_for(kLastResort);
    std::_Exit(code);
  }).detach();
  end_all(code);
}

std::atomic<bool> dying{false};
std::atomic<bool> reported{false};

struct StopSignal {
  int number;
  const char* name;
};
constexpr StopSignal kStopSignals[] = {
    {SIGINT, "SIGINT"}, {SIGTERM, "SIGTERM"}, {SIGHUP, "SIGHUP"}, {SIGXCPU, "SIGXCPU"}, {SIGPIPE, "SIGPIPE"}};

// A launcher and its scheduler may both send SIGTERM. This counts as one request.
constexpr int64_t kOneRequest = 500'000'000;  // nanoseconds

std::atomic<int> asked{0};
std::atomic<int> first_request{0};
std::atomic<int64_t> first_at{0};

int64_t nanoseconds() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

void on_signal(int signal) {
  int none = 0;
  asked.compare_exchange_strong(none, signal);
  if (signal == SIGPIPE || signal == SIGXCPU) return;  // the system sends these again and again, not a person
  const int64_t now = nanoseconds();
  int64_t first = 0;
  if (first_at.compare_exchange_strong(first, now)) {
    first_request = signal;
    return;
  }
  const bool second_interrupt = signal == SIGINT && first_request == SIGINT;
  if (second_interrupt || now - first > kOneRequest) _exit(exit_code_of_signal(signal));
}

}  // namespace

RunGuard& RunGuard::get() {
  static RunGuard guard;
  return guard;
}

void RunGuard::watch(World& world, double timeout) {
  timeout_ = timeout;
  if (!world.abort) return;
  world.abort = [abort = world.abort](const std::string& reason) {
    if (std::current_exception()) get().failing();  // first: the abort itself may hang
    std::string by_other = abort(reason);
    if (!by_other.empty()) get().failed_later(by_other);
    return by_other;
  };
}

void RunGuard::failed_later(const std::string& what) {
  const std::lock_guard lock(mutex_);
  other_failure_ = what;
}

std::string RunGuard::other_failure() {
  const std::lock_guard lock(mutex_);
  return other_failure_;
}

void RunGuard::end_by_other(const std::string& what) {
  if (!reported.exchange(true)) log_error(what);
  end_now(kOtherFailed);
}

void RunGuard::failing() {
  const Thrown thrown = what_is_thrown();
  if (thrown.by_other || dying.exchange(true)) return;
  forget_stop_signals();
  std::thread([this, what = thrown.what] {
    sleep_for(launcher_.started_many() ? kUnwind + kFirstReports : std::clamp(timeout_.load(), kUnwind, kUnwindAlone));
    if (const std::string by_other = other_failure(); !by_other.empty()) end_by_other(by_other);
    report(what);
    end_now(kFailed);
  }).detach();
}

void RunGuard::report(const std::string& what) {
  if (reported.exchange(true)) return;
  if (launcher_.started_many()) {
    log_error(concat(what, " (process ", launcher_.rank, " of ", launcher_.size, ", on ", host_name(), ")"));
  } else {
    log_error(what);
  }
}

int RunGuard::end_failed() {
  Thrown thrown = what_is_thrown();
  if (!launcher_.started_many()) {
    report(thrown.what);
    return kFailed;
  }
  forget_stop_signals();
  if (const std::string by_other = other_failure(); !by_other.empty()) thrown = {by_other, true};
  if (thrown.by_other) {
    failed_later(thrown.what);
    sleep_for(kEndedByOther);
    end_by_other(thrown.what);
  }
  if (launcher_.rank > 0) sleep_for(kFirstReports);
  report(thrown.what);
  sleep_for(kLastWords);
  end_now(kFailed);
}

struct RunGuard::Deadline::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
};

RunGuard::Deadline::Deadline(double seconds, std::string what) : state_(std::make_shared<State>()) {
  std::thread([state = state_, seconds, what = std::move(what)] {
    std::unique_lock lock(state->mutex);
    if (wait_patiently(state->changed, lock, seconds, [&] { return state->done; })) return;
    get().report(concat(what, " took longer than ", seconds, " s (pipeline.timeout): another process is stuck"));
    end_now(kFailed);
  }).detach();
}

RunGuard::Deadline::~Deadline() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->done = true;
  }
  state_->changed.notify_all();
}

void catch_stop_signals() {
  for (const StopSignal& signal : kStopSignals) {
    const auto before = std::signal(signal.number, on_signal);
    if (signal.number == SIGHUP && before == SIG_IGN) std::signal(SIGHUP, SIG_IGN);
  }
}

void forget_stop_signals() {
  for (const StopSignal& signal : kStopSignals) std::signal(signal.number, SIG_DFL);
}

int stop_signal() {
  return asked;
}

int agreed_stop_signal(const Processes& processes) {
  int signal = 0;
  for (const std::string& one : processes.to_first(std::to_string(stop_signal()))) {
    signal = std::max(signal, std::stoi(one));  // SIGTERM has a larger number than SIGINT
  }
  return std::stoi(processes.from_first(std::to_string(signal)));
}

std::string how_it_stops(int signal) {
  if (signal == SIGINT) return "interrupted";
  for (const StopSignal& one : kStopSignals) {
    if (one.number == signal) return concat("stopped by ", one.name);
  }
  return concat("stopped by signal ", signal);
}

int exit_code_of_signal(int signal) {
  return signal == 0 ? 0 : 128 + signal;
}

}  // namespace twobp
