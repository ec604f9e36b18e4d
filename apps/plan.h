// `twobp plan`: draws and times a schedule from given costs, before anything runs.
#pragma once

namespace CLI {
class App;
}

namespace twobp {

// Adds the subcommand; it runs as its callback and throws twobp::Error for what it cannot do.
void add_plan_command(CLI::App& app);

}  // namespace twobp
