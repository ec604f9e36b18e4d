#include "apps/stop_signals.h"

#include <algorithm>
#include <atomic>
#include <csignal>
#include <unistd.h>

namespace twobp {
namespace {

std::atomic<int> asked{0};

void on_signal(int signal) {
  // A launcher and the scheduler behind it may both send SIGTERM, so only a second Ctrl-C ends at once.
  if (asked.exchange(signal) == SIGINT && signal == SIGINT) _exit(kInterrupted);
}

}  // namespace

void catch_stop_signals() {
  std::signal(SIGINT, on_signal);
  std::signal(SIGTERM, on_signal);
}

void forget_stop_signals() {
  std::signal(SIGINT, SIG_DFL);
  std::signal(SIGTERM, SIG_DFL);
}

int stop_signal() {
  return asked;
}

int agreed_stop_signal(const Processes& processes) {
  int signal = 0;
  for (const std::string& one : processes.to_first(std::to_string(stop_signal()))) {
    signal = std::max(signal, std::stoi(one));  // SIGTERM has the larger number
  }
  return std::stoi(processes.from_first(std::to_string(signal)));
}

std::string how_it_stops(int signal) {
  return signal == SIGTERM ? "stopped by SIGTERM" : "interrupted";
}

int exit_code_of_signal(int signal) {
  return signal == 0 ? 0 : signal == SIGTERM ? kTerminated : kInterrupted;
}

}  // namespace twobp
