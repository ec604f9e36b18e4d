#include "apps/commands.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <sstream>
#include <string>
#include <sys/resource.h>
#include <unistd.h>
#include <vector>

#include "apps/print.h"
#include "apps/program.h"
#include "apps/run_guard.h"
#include "twobp/core/check.h"
#include "twobp/core/text.h"

namespace twobp {
namespace {

std::vector<std::string> options_of(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  return names;
}

// Returns the command whose arguments were being read.
const CLI::App& innermost(const CLI::App& app) {
  const std::vector<CLI::App*> parsed = app.get_subcommands();
  return parsed.empty() ? app : innermost(*parsed.back());
}

// All files of data.tokens stay open, and many systems allow 1024 at first.
void allow_many_files() {
  constexpr rlim_t kMany = 65536;
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = std::max(limit.rlim_cur, std::min(limit.rlim_max, kMany));
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace

CLI::Validator number_from(double least, double most) {
  const auto whole = [](double value) { return std::to_string(std::llround(value)); };
  const std::string range = most < std::numeric_limits<double>::max()
                                ? concat("from ", whole(least), " to ", whole(most))
                                : concat("of at least ", whole(least));
  CLI::Validator validator;
  validator.description(range);
  validator.operation([=](std::string& text) {
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    if (!text.empty() && *end == '\0' && value >= least && value <= most && std::isfinite(value)) return std::string();
    return concat("'", text, "' is not a number ", range);
  });
  return validator;
}

void check_commands(const CLI::App& app, int argc, const char* const* argv) {
  if (app.get_require_subcommand_min() == 0 || argc < 2 || argv[1][0] == '-') return;
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (command->get_name() == argv[1]) return check_commands(*command, argc - 1, argv + 1);
    names.push_back(command->get_name());
  }
  fail("there is no command \"", argv[1], "\": did you mean \"", nearest(argv[1], names), "\"? The commands are ",
       join(names));
}

void check_files(const CLI::App& command) {
  std::map<std::string, const char*> options;  // by file
  for (const char* name : {"--costs", "--metrics", "--trace", "--json", "--csv", "--svg"}) {
    const CLI::Option* option = command.get_option_no_throw(name);
    if (option == nullptr || option->count() == 0) continue;
    const std::string file = std::filesystem::path(option->as<std::string>()).lexically_normal().string();
    const auto [at, is_new] = options.emplace(file, name);
    TWOBP_CHECK(is_new || file.empty() || file.starts_with("/dev/"), at->second, " and ", name, " name the same file, ",
                file, ", which would be overwritten: give each its own");
  }
}

int end_of_parse(const CLI::App& app, const CLI::ParseError& error) {
  if (error.get_exit_code() == 0) {
    std::ostringstream text;
    app.exit(error, text, text);
    print_as_is(text.str());
    return 0;
  }
  std::string message = error.what();
  const CLI::App& command = innermost(app);
  for (const std::string& word : app.remaining(true)) {
    if (word.rfind("--", 0) == 0) {
      message += concat(": did you mean ", nearest(word.substr(0, word.find('=')), options_of(command)), "?");
      break;
    }
  }
  std::string words = command.get_name();
  for (const CLI::App* parent = command.get_parent(); parent != nullptr; parent = parent->get_parent())
    words = concat(parent->get_name(), " ", words);
  log_error(concat(message, " (", words, " --help lists the options)"));
  return kFailed;
}

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
  add_plan_command(app);
  add_profile_command(app);
  try {
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
