// The subcommands, each in a file of its own, and checks of the command line that its library lacks.
#pragma once

#include <limits>

#include <CLI/CLI.hpp>

namespace twobp {

class Trainer;

// Each adds a subcommand. Its callback runs it, and throws twobp::Error if it fails.
void add_bench_command(CLI::App& app, int& exit_code);       // compares the step times of schedules and policies
void add_checkpoint_command(CLI::App& app, int& exit_code);  // inspects, verifies, converts checkpoints
void add_eval_command(CLI::App& app);                        // loss and accuracy on the held-out data
void add_plan_command(CLI::App& app);     // draws and times schedules, and finds the best for a model
void add_profile_command(CLI::App& app);  // measures the layers: time and memory
void add_train_command(CLI::App& app, int& exit_code);

// Logs the parameters for which model.from has no tensors, and the tensors for which the model has no
// parameters.
void warn_of_inputs(const Trainer& trainer);

// Accepts finite numbers from `least` to `most`, which are whole. The library's own checks let NaN pass and
// wrap negative numbers around.
CLI::Validator number_from(double least, double most = std::numeric_limits<double>::max());

// Throws Error if a word in the place of a command is not a command, and suggests the nearest.
void check_commands(const CLI::App& app, int argc, const char* const* argv);

// Throws Error if two options of a command name the same file, which one of them writes.
void check_files(const CLI::App& command);

// Ends main() after a parse that ended with `error`. Prints the requested help or reports the error, and
// returns the exit code.
int end_of_parse(const CLI::App& app, const CLI::ParseError& error);

}  // namespace twobp
