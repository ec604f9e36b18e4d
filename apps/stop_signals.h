// Handles signals that ask a training run to end in a state from which it can resume: Ctrl-C, SIGTERM from a scheduler,
// SIGHUP from a terminal that closes, SIGXCPU at a limit of time, and SIGPIPE when the reader of the output has gone.
#pragma once

#include <string>

#include "twobp/transport/processes.h"

namespace twobp {

// From now on, a signal is only noted. A second request ends the program at once. It is a second Ctrl-C, or another
// signal at least half a second after the first one. SIGHUP stays ignored under nohup.
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
