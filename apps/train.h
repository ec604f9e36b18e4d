// `twobp train`: trains what a configuration describes.
#pragma once

#include <CLI/CLI.hpp>

namespace twobp {

void add_train_command(CLI::App& app, int& exit_code);

}  // namespace twobp
