// `twobp train`: trains what a configuration describes.
#pragma once

namespace CLI {
class App;
}

namespace twobp {

class Trainer;

void add_train_command(CLI::App& app, int& exit_code);

// Logs which parameters model.from has no tensors for.
void warn_of_new_parameters(const Trainer& trainer);

}  // namespace twobp
