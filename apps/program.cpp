#include "apps/program.h"

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

namespace twobp {
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

int run_program(int argc, char** argv) {
  prepare_descriptors();
  allow_many_files();
  CLI::App app{"Pipeline-parallel training with 2-stage backpropagation (arXiv 2405.18047)."};
  app.name("twobp");
  app.require_subcommand(1);
  app.set_version_flag("--version", TWOBP_VERSION);
  int exit_code = 0;
  add_train_command(app, exit_code);
  add_bench_command(app, exit_code);
  add_checkpoint_command(app, exit_code);
  add_eval_command(app);
  add_generate_command(app);
  add_plan_command(app);
  add_profile_command(app);
  try {
    log_in_color(is_terminal(STDERR_FILENO));
    check_commands(app, argc, argv);
    try {
      app.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
      exit_code = end_of_parse(app, error);
    }
    check_output();
  } catch (...) {
    return RunGuard::get().end_failed();
  }
  return exit_code;
}

}  // namespace twobp
