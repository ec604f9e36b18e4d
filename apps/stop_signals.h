// What Ctrl-C and a scheduler's SIGTERM ask of a training run: to end after the step at hand, at a state that
// it can go on from.
#pragma once

#include <string>

#include "twobp/train/processes.h"

namespace twobp {

inline constexpr int kInterrupted = 130;  // as shells report a program ended by SIGINT
inline constexpr int kTerminated = 143;   // and by SIGTERM

// From here on a signal is noted; a second SIGINT ends the program at once.
void catch_stop_signals();
// Back to a program that any signal ends: nothing is left to save.
void forget_stop_signals();

// What has come so far on this process: 0, SIGINT or SIGTERM.
int stop_signal();

// After a step that some process asked to be the last: the signal that stops the run, the same on all.
int agreed_stop_signal(const Processes& processes);

// "stopped by SIGTERM".
std::string how_it_stops(int signal);
// 0 for none.
int exit_code_of_signal(int signal);

}  // namespace twobp
