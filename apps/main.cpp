// twobp: the program. Each subcommand has a file of its own.
#include <algorithm>
#include <sys/resource.h>
#include <unistd.h>

#include <CLI/CLI.hpp>

#include "apps/bench.h"
#include "apps/checkpoint.h"
#include "apps/command_line.h"
#include "apps/eval.h"
#include "apps/generate.h"
#include "apps/log.h"
#include "apps/plan.h"
#include "apps/print.h"
#include "apps/profile.h"
#include "apps/run_guard.h"
#include "apps/train.h"

namespace {

// All files of data.tokens stay open, and many systems allow 1024 at first.
void allow_many_files() {
  constexpr rlim_t kMany = 65536;
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = std::max(limit.rlim_cur, std::min(limit.rlim_max, kMany));
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace

int main(int argc, char** argv) {
  twobp::prepare_descriptors();
  allow_many_files();
  CLI::App app{"Pipeline-parallel training with 2-stage backpropagation (arXiv 2405.18047)."};
  app.name("twobp");
  app.require_subcommand(1);
  app.set_version_flag("--version", TWOBP_VERSION);
  int exit_code = 0;
  twobp::add_train_command(app, exit_code);
  twobp::add_bench_command(app, exit_code);
  twobp::add_checkpoint_command(app, exit_code);
  twobp::add_eval_command(app);
  twobp::add_generate_command(app);
  twobp::add_plan_command(app);
  twobp::add_profile_command(app);
  try {
    twobp::log_in_color(twobp::is_terminal(STDERR_FILENO));
    twobp::check_commands(app, argc, argv);
    try {
      app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
      exit_code = twobp::end_of_parse(app, error);
    }
    twobp::check_output();
  } catch (...) {
    return twobp::RunGuard::get().end_failed();
  }
  return exit_code;
}
