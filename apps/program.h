// The program is a function: main() calls it, and tests call it in a fork. Each subcommand has a file of its own.
#pragma once

namespace twobp {

// Returns the exit code.
int run_program(int argc, char** argv);

}  // namespace twobp
