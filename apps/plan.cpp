// The flags of the subcommand, and which of its jobs they ask for.
#include "apps/plan.h"

#include <memory>
#include <string>
#include <utility>

#include <CLI/CLI.hpp>

#include "apps/plan_measured.h"
#include "apps/plan_model.h"
#include "apps/plan_options.h"
#include "apps/plan_schedule.h"
#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/plan/recompute_costs.h"
#include "twobp/schedule/named_schedules.h"

namespace twobp {
namespace {

// What the subcommand is asked to do: it has to be one of these.
enum PlanJob : unsigned {
  kDraw = 1U,      // one schedule, from costs on the command line
  kMeasure = 2U,   // all ways to run a configured model
  kCosts = 4U,     // the same from a cost model
  kMeasured = 8U,  // a trace beside its prediction
};

PlanJob job_of(const PlanOptions& options) {
  if (!options.measured.empty()) return kMeasured;
  if (!options.costs.empty()) return kCosts;
  return options.config.empty() ? kDraw : kMeasure;
}

std::string job_text(PlanJob job) {
  if (job == kMeasured) return "beside --measured, which has its schedule and times in the trace";
  if (job == kCosts) return "beside --costs";
  if (job == kMeasure) return "beside a configuration, whose model is measured and planned";
  return "where one schedule is drawn: to compare ways to run a model, give a configuration or --costs";
}

struct FlagUse {
  const char* name;
  unsigned jobs;
};
constexpr unsigned kModel = kMeasure | kCosts;
constexpr FlagUse kFlags[] = {
    {"config", kModel},
    {"--set", kModel},
    {"--schedule", kDraw | kModel},
    {"--stages", kDraw | kModel},
    {"--ranks", kDraw | kModel},
    {"--micro-batches", kDraw | kModel},
    {"--p2", kDraw | kModel},
    {"--forward", kDraw},
    {"--backward-p1", kDraw},
    {"--backward-p2", kDraw},
    {"--p2-units", kDraw},
    {"--cap", kDraw},
    {"--color", kDraw},
    {"--csv", kDraw | kModel},
    {"--csv-form", kDraw | kModel},
    {"--costs", kCosts},
    {"--micro-batch-sizes", kModel},
    {"--recompute", kModel},
    {"--memory", kModel},
    {"--batch", kModel},
    {"--top", kModel},
    {"--all", kModel},
    {"--search", kModel},
    {"--seconds", kMeasure},
};

// An option that the job does not look at is refused: it would change nothing.
void check_flags(const CLI::App& plan, PlanJob job) {
  for (const FlagUse& flag : kFlags) {
    if ((flag.jobs & job) != 0 || plan.get_option(flag.name)->count() == 0) continue;
    fail(flag.name, " plays no part ", job_text(job));
  }
  for (const auto& [flag, needs] :
       {std::pair{"--csv-form", "--csv"}, std::pair{"--svg-end", "--svg"}, std::pair{"--set", "config"}}) {
    TWOBP_CHECK(plan.get_option(flag)->count() == 0 || plan.get_option(needs)->count() > 0, flag,
                " plays no part without ", needs == std::string("config") ? "a configuration" : needs);
  }
  TWOBP_CHECK(plan.get_option("--top")->count() == 0 || plan.get_option("--all")->count() == 0,
              "--top plays no part beside --all");
}

}  // namespace

void add_plan_command(CLI::App& app) {
  auto options = std::make_shared<PlanOptions>();
  CLI::App* plan = app.add_subcommand("plan",
                                      "Draw and time a schedule from given costs; with a configuration, or "
                                      "--costs: compare all ways to run that "
                                      "model by predicted throughput, and say whether 2BP helps. Options "
                                      "marked [list] may then be lists: 2,4,8 "
                                      "or 2..8");
  plan->add_option("config", options->config, "JSON file, as for train: its model is measured and planned");
  plan->add_option("--set", options->overrides, "override a key of it: section.key=value")->take_all();
  const auto text = [&](const char* flag, std::string& value, const std::string& help) {
    return plan->add_option(flag, value, help)->capture_default_str();
  };
  text("--schedule", options->schedule,
       "[list] one of " + join(schedule_names()) +
           " (default: 1f1b; all to compare), or a file that ends in .csv, in PyTorch's text form");
  text("--stages", options->stages, "[list] number of stages (default: by --ranks, else 4)");
  text("--ranks", options->ranks,
       "[list] number of ranks N (default: stages over the schedule's stages a rank)");
  text("--micro-batches", options->micro_batches,
       "[list] number M (default: the schedule's own; N, 2N and 4N to compare)");
  text("--p2", options->p2,
       "[list] when weight gradients run: " + join(policy_names()) +
           " (default: placed where the schedule does, "
           "else fill; all to compare)");
  text("--forward", options->forward, "cost of F: a number, or a comma list with one per stage");
  text("--backward-p1", options->backward_p1, "cost of I, likewise");
  text("--backward-p2", options->backward_p2, "cost of W, likewise");
  plan->add_option("--p2-units", options->p2_units, "pieces W runs in while waiting for a message")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  plan->add_option("--cap", options->cap, "most micro-batches a rank may hold; 0: any number")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  text("--color", options->color, "auto, always or never")->check(CLI::IsMember({"auto", "always", "never"}));
  text("--json", options->json, "also write the result to this file");
  text("--timeline", options->timeline, "also draw it as an HTML page");
  text("--svg", options->svg, "also draw it as an SVG picture");
  plan->add_option("--svg-end", options->svg_end,
                   "where the picture's time axis ends (default: with the step)")
      ->check(CLI::NonNegativeNumber);
  text("--measured", options->measured,
       "a trace of 'twobp train --trace': its schedule simulated with the times it took, beside what was "
       "measured; with --timeline both on one page");
  text("--csv", options->csv,
       "also write the order in PyTorch's text form; W under fill or a cap where the simulation ran it");
  text("--csv-form", options->csv_form,
       "compute_only, or compute_comms: with the messages, as PyTorch places them")
      ->check(CLI::IsMember({"compute_only", "compute_comms"}));
  text("--costs", options->costs, "a cost model of 'twobp profile --json', in place of measuring");
  text(
      "--micro-batch-sizes", options->micro_batch_sizes,
      "[list] samples a micro-batch (default: those of --costs; half, once and twice the configured number)");
  text("--recompute", options->recompute,
       "[list] what layers but the first and last compute again: " + join(recompute_modes()) +
           " (default: all; with pipeline.recompute configured: that alone)");
  text("--memory", options->memory, "what a rank has for everything, such as 80GiB (default: any)");
  plan->add_option("--batch", options->batch, "only combinations with so many samples a step; 0: any")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  plan->add_option("--top", options->top, "so many of the best are shown")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  plan->add_flag("--all", options->all, "show all combinations that fit (slow: each is simulated)");
  plan->add_flag("--search", options->search,
                 "also look for schedules without a name, placed as the best ones: rows 'auto'");
  plan->add_option("--seconds", options->seconds, "how long to measure each size and recomputation")
      ->capture_default_str();
  plan->callback([options, plan] {
    const PlanJob job = job_of(*options);
    check_flags(*plan, job);
    if (job == kMeasured) return plan_measured(*options);
    if (job == kDraw) return plan_schedule(*options);
    plan_model(*options);
  });
}

}  // namespace twobp
