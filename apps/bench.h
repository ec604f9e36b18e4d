// `twobp bench`: compares the times of schedules and p2 policies, interleaved, on one model in one process.
#pragma once

namespace CLI {
class App;
}

namespace twobp {

void add_bench_command(CLI::App& app, int& exit_code);

}  // namespace twobp
