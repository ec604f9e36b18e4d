// `twobp checkpoint`: what is in a checkpoint, whether it is whole, and as something else.
#pragma once

namespace CLI {
class App;
}

namespace twobp {

void add_checkpoint_command(CLI::App& app, int& exit_code);

}  // namespace twobp
