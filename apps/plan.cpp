// Defines the flags of the subcommand, and chooses its job by them.
#include "apps/plan.h"

#include <memory>
#include <string>
#include <utility>

#include <CLI/CLI.hpp>

#include "apps/command_line.h"
#include "apps/plan_measured.h"
#include "apps/plan_model.h"
#include "apps/plan_options.h"
#include "apps/plan_schedule.h"
#include "twobp/core/check.h"
#include "twobp/core/recompute_mode.h"
#include "twobp/core/text.h"
#include "twobp/pipeline/pipeline_shape.h"
#include "twobp/schedule/named_schedules.h"
#include "twobp/train/trainer.h"
#include "twobp/transport/start.h"

namespace twobp {
namespace {

// The subcommand has exactly one of these jobs.
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
  if (job == kMeasured) return "with --measured, whose trace has the schedule and the times";
  if (job == kCosts) return "with --costs";
  if (job == kMeasure) return "with a configuration, whose model is measured and planned";
  return "for a single schedule: to compare ways to run a model, give a configuration or --costs";
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
    {"--slices", kDraw | kModel},
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
    {"--memory", kDraw | kModel},
    {"--batch", kModel},
    {"--top", kModel},
    {"--all", kModel},
    {"--search", kDraw | kModel},
    {"--seconds", kMeasure},
};

// Rejects options that the job would ignore.
void check_flags(const CLI::App& plan, PlanJob job, const PlanOptions& options) {
  for (const FlagUse& flag : kFlags) {
    if ((flag.jobs & job) != 0 || plan.get_option(flag.name)->count() == 0) continue;
    fail(flag.name, " has no effect ", job_text(job));
  }
  for (const auto& [flag, needs] : {std::pair{"--csv-form", "--csv"}, std::pair{"--svg-end", "--svg"},
                                    std::pair{"--no-ops", "--json"}, std::pair{"--set", "config"}}) {
    TWOBP_CHECK(plan.get_option(flag)->count() == 0 || plan.get_option(needs)->count() > 0, flag,
                " has no effect without ", needs == std::string("config") ? "a configuration" : needs);
  }
  const auto given = [&](const char* flag) { return plan.get_option(flag)->count() > 0; };
  if (job == kDraw) {
    TWOBP_CHECK(given("--data-parallel") == given("--gradient-seconds"),
                "give --data-parallel and --gradient-seconds together: the number of replicas that sum their "
                "gradients, and the time that a stage's gradients take over a link");
    TWOBP_CHECK(!given("--share-links") || given("--latency") || given("--message-seconds"),
                "--share-links has no effect without --latency or --message-seconds: messages take no time");
    TWOBP_CHECK(!given("--order-for-rendezvous") || options.csv_form != "compute_comms",
                "--csv-form compute_comms has messages where PyTorch places them, not where "
                "--order-for-rendezvous does: write compute_only, or leave out one of the two");
  } else if (!given("--data-parallel") && !given("--devices")) {
    for (const char* flag : {"--data-latency", "--data-bandwidth"}) {
      TWOBP_CHECK(!given(flag), flag, " has no effect without --data-parallel or --devices");
    }
  }
  TWOBP_CHECK(plan.get_option("--top")->count() == 0 || plan.get_option("--all")->count() == 0,
              "--top has no effect with --all");
}

// Adds the options of messages, and of replicas that sum their gradients.
void add_network_options(CLI::App& plan, PlanOptions& options) {
  const auto number = [&](const char* flag, auto& value, const std::string& help) {
    return plan.add_option(flag, value, help)->check(number_from(0));
  };
  const auto text = [&](const char* flag, std::string& value, const std::string& help) {
    return plan.add_option(flag, value, help)->capture_default_str();
  };
  plan.add_flag("--rendezvous", options.rendezvous,
                "reject a schedule that would block if each send waits until the receiver reaches the receive");
  plan.add_flag("--order-for-rendezvous", options.order_for_rendezvous,
                "move receives forward so that the sends of --rendezvous never block; F, I and W keep their "
                "order");
  plan.add_option("--buffers", options.buffers,
                  "reject a schedule if more messages than this may wait for a rank, however long ops take")
      ->check(number_from(0));
  number("--latency", options.latency,
         "time from the end of sending a message until the receiver has it (default: 0; with a model: "
         "seconds, from the costs)");
  text("--message-seconds", options.message_seconds,
       "time that a message of a stage occupies its link, which carries one at a time: a number, or one for "
       "each stage, separated by commas");
  text("--bandwidth", options.bandwidth, "bytes per second of a link, such as 10GB (default: from the costs)");
  number("--share-links", options.share_links,
         "ranks in each node. Messages that leave a node share one link, with --latency and --message-seconds "
         "or --bandwidth. Messages within a node take no time, or the time from the costs. 0: each pair of "
         "ranks has its own link");
  text("--data-parallel", options.data_parallel,
       "[list] replicas of the pipeline, which sum their gradients when a stage's last W is done (default: 1, "
       "or the configured number)");
  text("--gradient-seconds", options.gradient_seconds,
       "time that a stage's gradients take over a link: a number, or one for each stage; a ring of d "
       "replicas needs 2 (d - 1) / d of it");
  number("--data-latency", options.data_latency,
         "latency of a sum over replicas in seconds (default: that of a link, or of the link out of a node)");
  text("--data-bandwidth", options.data_bandwidth,
       "bytes per second of the link for sums over replicas (default: as for --data-latency)");
  number("--devices", options.devices, "only combinations whose ranks x replicas equal this; 0: any");
}

std::string described_schedules() {
  constexpr size_t kNameColumn = 18;
  std::string text = "Schedules, for N ranks and M micro-batches:\n";
  for (const NamedSchedule& one : named_schedules())
    text += concat("  ", one.name, std::string(kNameColumn - one.name.size(), ' '), one.what, "\n");
  return text;
}

// Adds what is drawn or planned, and the costs of ops.
void add_schedule_options(CLI::App& plan, PlanOptions& options) {
  const auto text = [&](const char* flag, std::string& value, const std::string& help) {
    return plan.add_option(flag, value, help)->capture_default_str();
  };
  text("--schedule", options.schedule,
       "[list] one of " + join(schedule_names()) +
           ", a file in PyTorch's text form that ends in .csv, or NAME@POLICY; several are compared "
           "(default: 1f1b; with a model: all names)");
  text("--stages", options.stages, "[list] number of stages (default: from --ranks, else 4)");
  text("--ranks", options.ranks,
       "[list] number of ranks N (default: stages / the schedule's stages per rank; with a model: that of the "
       ".csv files, else the configured one)");
  text("--micro-batches", options.micro_batches,
       "[list] number of micro-batches M (default: the schedule's own; with a model: N, 2N and 4N)");
  text("--slices", options.slices,
       "[list] slices of each micro-batch's sequences, pipeline.slices (default: 1; with a model: 1 and the "
       "configured number, or all in --costs); without a model they are equal, and costs stay those of a "
       "whole "
       "micro-batch");
  text("--p2", options.p2,
       "[list] p2 policy, which decides when weight gradients run: " + join(policy_names()) +
           " (default: a file as it is written, else fill; with a model: all)");
  text("--forward", options.forward, "cost of F: a number, or one for each stage, separated by commas");
  text("--backward-p1", options.backward_p1, "cost of I, as for --forward");
  text("--backward-p2", options.backward_p2, "cost of W, as for --forward");
  plan.add_option("--p2-units", options.p2_units,
                  "number of pieces of W; a waiting rank looks for its message between them")
      ->capture_default_str()
      ->check(number_from(1));
  plan.add_option("--cap", options.cap, "largest number of micro-batches that a rank may hold; 0: no limit")
      ->capture_default_str()
      ->check(number_from(0));
}

// Adds the files and pictures to write.
void add_output_options(CLI::App& plan, PlanOptions& options) {
  const auto text = [&](const char* flag, std::string& value, const std::string& help) {
    return plan.add_option(flag, value, help)->capture_default_str();
  };
  text("--color", options.color, "auto, always or never")->check(CLI::IsMember({"auto", "always", "never"}));
  text("--json", options.json, "also write the result to this file");
  plan.add_flag("--no-ops", options.no_ops,
                "leave ops and instructions out of --json; for a thousand ranks they would take gigabytes");
  text("--timeline", options.timeline, "also draw the schedule as an HTML page in this file");
  text("--svg", options.svg, "also draw the schedule as an SVG picture in this file");
  plan.add_option("--svg-end", options.svg_end, "end of the picture's time axis (default: the end of the step)")
      ->check(number_from(0));
  text("--measured", options.measured,
       "a trace of 'twobp train --trace': compare its schedule, simulated with the measured times, with the "
       "real run; with --timeline both are on one page");
  text("--csv", options.csv,
       "also write the order in PyTorch's text form to this file; under fill or a cap, W stands where the "
       "simulation ran it");
  text("--csv-form", options.csv_form, "compute_only, or compute_comms: with the messages, as PyTorch places them")
      ->check(CLI::IsMember({"compute_only", "compute_comms"}));
}

// Adds what only a plan of a model has.
void add_model_options(CLI::App& plan, PlanOptions& options) {
  const auto text = [&](const char* flag, std::string& value, const std::string& help) {
    return plan.add_option(flag, value, help)->capture_default_str();
  };
  text("--costs", options.costs, "a cost model of 'twobp profile --json', instead of measuring");
  text("--micro-batch-sizes", options.micro_batch_sizes,
       "[list] samples per micro-batch (default: from --costs, or half, once and twice the configured "
       "number)");
  text("--recompute", options.recompute,
       "[list] recomputation in all layers except the first and the last: " + join(recompute_names()) +
           " (default: all, or only pipeline.recompute if that is configured)");
  text("--memory", options.memory,
       "memory of each rank for everything, such as 80GiB (default: no limit); without a model: as --cap");
  plan.add_option("--batch", options.batch, "only combinations with this many samples per step; 0: any")
      ->capture_default_str()
      ->check(number_from(0));
  plan.add_option("--top", options.top, "number of the best combinations to show")
      ->capture_default_str()
      ->check(number_from(1));
  plan.add_flag("--all", options.all, "show all combinations that fit (slow: each is simulated)");
  plan.add_flag("--search", options.search,
                "also search for new schedules, with the placements of the best or given ones (rows 'auto')");
  plan.add_option("--seconds", options.seconds, "how long to measure each size and recomputation")
      ->check(number_from(0))
      ->capture_default_str();
}

}  // namespace

void add_plan_command(CLI::App& app) {
  auto options = std::make_shared<PlanOptions>();
  CLI::App* plan = app.add_subcommand("plan",
                                      "Draw and time a schedule from given costs. With a configuration or "
                                      "--costs: compare all ways to run that model by predicted throughput, "
                                      "and say whether 2BP helps; options marked [list] may then be lists, "
                                      "such as 2,4,8 or 2..8. Otherwise only --schedule and --p2 may be");
  plan->add_option("config", options->config, "JSON file, as for train: its model is measured and planned");
  plan->add_option("--set", options->overrides, "override a key of the configuration: section.key=value")->take_all();
  add_schedule_options(*plan, *options);
  add_network_options(*plan, *options);
  add_output_options(*plan, *options);
  add_model_options(*plan, *options);
  plan->footer(described_schedules());
  plan->callback([options, plan] {
    check_alone("plan", find_launcher());
    const PlanJob job = job_of(*options);
    check_flags(*plan, job, *options);
    check_files(*plan);
    if (job == kMeasured) return plan_measured(*options);
    if (job == kDraw) return plan_schedule(*options);
    plan_model(*options);
  });
}

}  // namespace twobp
