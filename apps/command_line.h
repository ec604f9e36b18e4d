// These checks of the command line are missing in its library.
#pragma once

#include <limits>

#include <CLI/CLI.hpp>

namespace twobp {

// Accepts finite numbers from `least` to `most`, which are whole. The library's own checks let NaN pass and wrap
// negative numbers around.
CLI::Validator number_from(double least, double most = std::numeric_limits<double>::max());

// Throws Error if a word in the place of a command is not a command, and suggests the nearest.
void check_commands(const CLI::App& app, int argc, const char* const* argv);

// Throws Error if two options of a command name the same file, which one of them writes.
void check_files(const CLI::App& command);

// Ends main() after a parse that ended with `error`. Prints the requested help or reports the error, and returns the
// exit code.
int end_of_parse(const CLI::App& app, const CLI::ParseError& error);

}  // namespace twobp
