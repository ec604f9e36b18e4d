// `twobp train`: trains what a configuration describes.
#pragma once

#include <CLI/CLI.hpp>

namespace twobp {

class Trainer;

void add_train_command(CLI::App& app, int& exit_code);

// Logs which parameters model.from has no tensors for.
void warn_of_new_parameters(const Trainer& trainer);

}  // namespace twobp
