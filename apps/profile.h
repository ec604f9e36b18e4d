// `twobp profile`: the cost of each kind of layer, in time and in memory.
#pragma once

namespace CLI {
class App;
}

namespace twobp {

void add_profile_command(CLI::App& app);

}  // namespace twobp
