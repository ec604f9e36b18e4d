// Checks of the command line that its library lacks.
#pragma once

#include <limits>

#include <CLI/CLI.hpp>

namespace twobp {

// For options that take numbers: finite, from `least` to `most`, which are whole. The library's own checks
// let NaN pass, and wrap negative numbers around.
CLI::Validator number_from(double least, double most = std::numeric_limits<double>::max());

// Throws Error if a word that stands for a command is none, and suggests the nearest.
void check_commands(const CLI::App& app, int argc, const char* const* argv);

// Throws Error if two options of a command name the same file, which one of them writes.
void check_files(const CLI::App& command);

// What main() returns after a parse that ended with `error`: prints the help that was asked for, or reports
// what is wrong.
int end_of_parse(const CLI::App& app, const CLI::ParseError& error);

}  // namespace twobp
