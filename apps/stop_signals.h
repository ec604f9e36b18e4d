// Ctrl-C, and SIGTERM from a scheduler, ask a training run to end after the current step, in a state from
// which it can resume.
#pragma once

#include <string>

#include "twobp/train/processes.h"

namespace twobp {

inline constexpr int kInterrupted = 130;  // the shell's exit code for a program ended by SIGINT
inline constexpr int kTerminated = 143;   // and for one ended by SIGTERM

// From now on a signal is only noted. A second SIGINT ends the program at once.
void catch_stop_signals();
// From now on any signal ends the program again, because nothing is left to save.
void forget_stop_signals();

// The signal that this process has received: 0, SIGINT or SIGTERM.
int stop_signal();

// Call after a step that some process asked to be the last. Returns the signal that stops the run, the same
// on all processes.
int agreed_stop_signal(const Processes& processes);

// "stopped by SIGTERM".
std::string how_it_stops(int signal);
// 0 for none.
int exit_code_of_signal(int signal);

}  // namespace twobp
