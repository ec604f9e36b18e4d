// `twobp plan`: draws and times a schedule from given costs, before anything runs.
#pragma once

namespace CLI {
class App;
}

namespace twobp {

// Adds the subcommand. Its callback runs it and throws twobp::Error if it fails.
void add_plan_command(CLI::App& app);

}  // namespace twobp
