// `twobp checkpoint`: inspects, verifies and converts checkpoints.
#pragma once

namespace CLI {
class App;
}

namespace twobp {

void add_checkpoint_command(CLI::App& app, int& exit_code);

}  // namespace twobp
