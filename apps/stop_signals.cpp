#include "apps/stop_signals.h"

#include <algorithm>
#include <atomic>
#include <csignal>
#include <ctime>
#include <unistd.h>

#include "twobp/core/check.h"

namespace twobp {
namespace {

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
