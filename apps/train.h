// `twobp train`: trains the model that a configuration describes.
#pragma once

namespace CLI {
class App;
}

namespace twobp {

class Trainer;

void add_train_command(CLI::App& app, int& exit_code);

// Logs the parameters for which model.from has no tensors, the tensors for which the model has no parameters, and the
// pictures that are not read.
void warn_of_inputs(const Trainer& trainer);

}  // namespace twobp
