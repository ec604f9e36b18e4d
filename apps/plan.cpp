// The flags of the subcommand, and the choice of its job by them.
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
#include "twobp/train/run_world.h"

namespace twobp {
namespace {

// The job of the subcommand: exactly one of these.
enum PlanJob : unsigned {
  kDraw = 1U,      // one schedule, from costs on the command line
  kMeasure = 2U,   // all ways to run a configured model
  kCosts = 4U,     // the same from a cost model
  kMeasured = 8U,  // a trace and its prediction
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
    {"--rendezvous", kDraw},
    {"--order-for-rendezvous", kDraw},
    {"--buffers", kDraw},
    {"--latency", kDraw | kModel},
    {"--message-seconds", kDraw},
    {"--bandwidth", kModel},
    {"--share-links", kDraw | kModel},
    {"--data-parallel", kDraw | kModel},
    {"--gradient-seconds", kDraw},
    {"--data-latency", kModel},
    {"--data-bandwidth", kModel},
    {"--devices", kModel},
    {"--color", kDraw},
    {"--no-ops", kDraw},
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

// Rejects options that the job ignores.
void check_flags(const CLI::App& plan, PlanJob job, const PlanOptions& options) {
  for (const FlagUse& flag : kFlags) {
    if ((flag.jobs & job) != 0 || plan.get_option(flag.name)->count() == 0) continue;
    fail(flag.name, " plays no part ", job_text(job));
  }
  for (const auto& [flag, needs] : {std::pair{"--csv-form", "--csv"}, std::pair{"--svg-end", "--svg"},
                                    std::pair{"--no-ops", "--json"}, std::pair{"--set", "config"}}) {
    TWOBP_CHECK(plan.get_option(flag)->count() == 0 || plan.get_option(needs)->count() > 0, flag,
                " plays no part without ", needs == std::string("config") ? "a configuration" : needs);
  }
  const auto given = [&](const char* flag) { return plan.get_option(flag)->count() > 0; };
  if (job == kDraw) {
    TWOBP_CHECK(
        given("--data-parallel") == given("--gradient-seconds"),
        "--data-parallel and --gradient-seconds go together: how many replicas sum their gradients, and "
        "how long a stage's take over a link");
    TWOBP_CHECK(!given("--share-links") || given("--latency") || given("--message-seconds"),
                "--share-links plays no part without --latency or --message-seconds: messages take no time");
    TWOBP_CHECK(!given("--order-for-rendezvous") || options.csv_form != "compute_comms",
                "--csv-form compute_comms has messages where PyTorch places them, not where "
                "--order-for-rendezvous does: write compute_only, or leave out one of the two");
  } else if (!given("--data-parallel") && !given("--devices")) {
    for (const char* flag : {"--data-latency", "--data-bandwidth"}) {
      TWOBP_CHECK(!given(flag), flag, " plays no part without --data-parallel or --devices");
    }
  }
  TWOBP_CHECK(plan.get_option("--top")->count() == 0 || plan.get_option("--all")->count() == 0,
              "--top plays no part beside --all");
}

// The options of messages, and of replicas that sum their gradients.
void add_network_options(CLI::App& plan, PlanOptions& options) {
  const auto number = [&](const char* flag, auto& value, const std::string& help) {
    return plan.add_option(flag, value, help)->check(CLI::NonNegativeNumber);
  };
  const auto text = [&](const char* flag, std::string& value, const std::string& help) {
    return plan.add_option(flag, value, help)->capture_default_str();
  };
  plan.add_flag(
      "--rendezvous", options.rendezvous,
      "refuse a schedule that would block where sends wait until the receiver stands at the receive");
  plan.add_flag("--order-for-rendezvous", options.order_for_rendezvous,
                "move receives forward so that such sends never block; the order of F, I and W stays");
  plan.add_option(
          "--buffers", options.buffers,
          "refuse a schedule in which more messages than this may wait for a rank, however long ops take")
      ->check(CLI::NonNegativeNumber);
  number("--latency", options.latency,
         "time from the end of a message's sending until the receiver has it (default: 0; with a model, in "
         "seconds: that of the costs)");
  text("--message-seconds", options.message_seconds,
       "how long a message of a stage keeps its link, which carries one at a time: a number, or a comma list "
       "with one per stage");
  text("--bandwidth", options.bandwidth,
       "bytes a second of a link, such as 10GB (default: that of the costs)");
  number(
      "--share-links", options.share_links,
      "ranks in a node: messages that leave it share one link, of --latency and --message-seconds or "
      "--bandwidth, and messages within it take no time, or that of the costs; 0: every two ranks have their "
      "own");
  text(
      "--data-parallel", options.data_parallel,
      "[list] replicas of the pipeline, which sum their gradients when a stage's last W is done (default: 1, "
      "or the configured number)");
  text("--gradient-seconds", options.gradient_seconds,
       "time that a stage's gradients take over a link: a number, or one per stage; a ring of d replicas "
       "needs "
       "2 (d - 1) / d of it");
  number("--data-latency", options.data_latency,
         "seconds of latency of such a sum (default: that of a link, out of a node where links are shared)");
  text("--data-bandwidth", options.data_bandwidth,
       "bytes a second of the link that sums go over (default: as for --data-latency)");
  number("--devices", options.devices,
         "only combinations with so many ranks in all: ranks x replicas, as many as that makes; 0: any");
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
  add_network_options(*plan, *options);
  text("--color", options->color, "auto, always or never")->check(CLI::IsMember({"auto", "always", "never"}));
  text("--json", options->json, "also write the result to this file");
  plan->add_flag(
      "--no-ops", options->no_ops,
      "leave each op and instruction out of --json: a few lines a rank, not gigabytes for a thousand ranks");
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
    check_alone("plan", find_launcher());
    const PlanJob job = job_of(*options);
    check_flags(*plan, job, *options);
    if (job == kMeasured) return plan_measured(*options);
    if (job == kDraw) return plan_schedule(*options);
    plan_model(*options);
  });
}

}  // namespace twobp
