// `twobp generate`: text from a trained model.
#pragma once

namespace CLI {
class App;
}

namespace twobp {

void add_generate_command(CLI::App& app);

}  // namespace twobp
