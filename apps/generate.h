// `twobp generate`: continues a text with a trained model.
#pragma once

namespace CLI {
class App;
}

namespace twobp {

void add_generate_command(CLI::App& app);

}  // namespace twobp
