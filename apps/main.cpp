// twobp: the program. Each subcommand has a file of its own.
#include <malloc.h>

#include <CLI/CLI.hpp>

#include "apps/bench.h"
#include "apps/checkpoint.h"
#include "apps/eval.h"
#include "apps/generate.h"
#include "apps/plan.h"
#include "apps/profile.h"
#include "apps/run_guard.h"
#include "apps/train.h"

namespace {

// Training allocates and frees the same sizes again and again: kept in the process, they need no page faults.
void keep_freed_memory() {
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
}

}  // namespace

int main(int argc, char** argv) {
  keep_freed_memory();
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
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e);
  } catch (...) {
    return twobp::RunGuard::get().end_failed();
  }
  return exit_code;
}
