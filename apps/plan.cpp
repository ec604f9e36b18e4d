// Defines the flags of the subcommand, and chooses its job by them.
#include "apps/plan.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include <CLI/CLI.hpp>

#include "apps/commands.h"
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
  kDraw = 1U,     // schedules, from costs on the command line
  kMeasure = 2U,  // all ways to run a configured model
  kCosts = 4U,    // the same from a cost model
};
constexpr unsigned kModel = kMeasure | kCosts;
constexpr unsigned kAnyJob = kDraw | kModel;

PlanJob job_of(const PlanOptions& options) {
  if (!options.costs.empty()) return kCosts;
  return options.config.empty() ? kDraw : kMeasure;
}

std::string job_text(PlanJob job) {
  if (job == kCosts) return "with --costs";
  if (job == kMeasure) return "with a configuration, whose model is measured and planned";
  return "for a single schedule: to compare ways to run a model, give a configuration or --costs";
}

// The subcommand's flags, each with the jobs that read it.
class Flags {
 public:
  Flags(CLI::App& plan, PlanOptions& options) : plan_(plan), options_(options) {
    auto* config =
        plan.add_option("config", options.config, "JSON file, as for train: its model is measured and planned");
    jobs_.emplace_back(config, kModel);
    jobs_.emplace_back(
        plan.add_option("--set", options.overrides, "override a key of the configuration: section.key=value")
            ->take_all(),
        kModel);
    add_schedule();
    add_network();
    add_output();
    add_model();
  }

  // Rejects options that the job would ignore.
  void check(PlanJob job) const {
    for (const auto& [option, jobs] : jobs_) {
      if ((jobs & job) != 0 || option->count() == 0) continue;
      fail(option->get_name(), " has no effect ", job_text(job));
    }
    needs("--svg-end", {"--svg"}, "--svg");
    needs("--no-ops", {"--json"}, "--json");
    needs("--set", {"config"}, "a configuration");
    if (job == kDraw) {
      TWOBP_CHECK(given("--data-parallel") == given("--gradient-seconds"),
                  "give --data-parallel and --gradient-seconds together: the number of replicas that sum "
                  "their gradients, and the time that a stage's gradients take over a link");
      needs("--share-links", {"--latency", "--message-seconds"},
            "--latency or --message-seconds: messages take no time");
    } else {
      needs("--data-latency", {"--data-parallel", "--devices"}, "--data-parallel or --devices");
      needs("--data-bandwidth", {"--data-parallel", "--devices"}, "--data-parallel or --devices");
    }
    TWOBP_CHECK(!given("--top") || !given("--all"), "--top has no effect with --all");
  }

 private:
  bool given(const char* flag) const { return plan_.get_option(flag)->count() > 0; }
  void needs(const char* flag, const std::vector<const char*>& others, const char* what) const {
    const bool met = std::any_of(others.begin(), others.end(), [&](const char* one) { return given(one); });
    TWOBP_CHECK(!given(flag) || met, flag, " has no effect without ", what);
  }

  void text(unsigned jobs, const char* flag, std::string& value, const std::string& help) {
    jobs_.emplace_back(plan_.add_option(flag, value, help)->capture_default_str(), jobs);
  }
  template <typename Number>
  CLI::Option* number(unsigned jobs, const char* flag, Number& value, const std::string& help, double least = 0) {
    CLI::Option* option = plan_.add_option(flag, value, help)->check(number_from(least));
    jobs_.emplace_back(option, jobs);
    return option;
  }
  void flag(unsigned jobs, const char* flag, bool& value, const std::string& help) {
    jobs_.emplace_back(plan_.add_flag(flag, value, help), jobs);
  }

  // What is drawn or planned, and the costs of ops.
  void add_schedule() {
    text(kAnyJob, "--schedule", options_.schedule,
         "[list] one of " + join(schedule_names()) +
             ", a file in PyTorch's text form that ends in .csv, or NAME@POLICY; several are compared "
             "(default: 1f1b; with a model: all names)");
    text(kAnyJob, "--stages", options_.stages, "[list] number of stages (default: from --ranks, else 4)");
    text(kAnyJob, "--ranks", options_.ranks,
         "[list] number of ranks N (default: stages / the schedule's stages per rank; with a model: that of "
         "the .csv files, else the configured one)");
    text(kAnyJob, "--micro-batches", options_.micro_batches,
         "[list] number of micro-batches M (default: the schedule's own; with a model: N, 2N and 4N)");
    text(kAnyJob, "--slices", options_.slices,
         "[list] slices of each micro-batch's sequences, pipeline.slices (default: 1; with a model: 1 and "
         "the configured number, or all in --costs); without a model they are equal, and costs stay those "
         "of a whole micro-batch");
    text(kAnyJob, "--p2", options_.p2,
         "[list] p2 policy, which decides when weight gradients run: " + join(policy_names()) +
             " (default: a file as it is written, else fill; with a model: all)");
    text(kDraw, "--forward", options_.forward, "cost of F: a number, or one for each stage, separated by commas");
    text(kDraw, "--backward-p1", options_.backward_p1, "cost of I, as for --forward");
    text(kDraw, "--backward-p2", options_.backward_p2, "cost of W, as for --forward");
    number(kDraw, "--p2-units", options_.p2_units,
           "number of pieces of W; a waiting rank looks for its message between them", 1)
        ->capture_default_str();
  }

  // Messages, and replicas that sum their gradients.
  void add_network() {
    number(kAnyJob, "--latency", options_.latency,
           "time from the end of sending a message until the receiver has it (default: 0; with a model: "
           "seconds, from the costs)");
    text(kDraw, "--message-seconds", options_.message_seconds,
         "time that a message of a stage occupies its link, which carries one at a time: a number, or one "
         "for each stage, separated by commas");
    text(kModel, "--bandwidth", options_.bandwidth,
         "bytes per second of a link, such as 10GB (default: from the costs)");
    number(kAnyJob, "--share-links", options_.share_links,
           "ranks in each node. Messages that leave a node share one link, with --latency and "
           "--message-seconds or --bandwidth. Messages within a node take no time, or the time from the "
           "costs. 0: each pair of ranks has its own link");
    text(kAnyJob, "--data-parallel", options_.data_parallel,
         "[list] replicas of the pipeline, which sum their gradients when a stage's last W is done "
         "(default: 1, or the configured number)");
    text(kMeasure, "--experts", options_.experts,
         "[list] replicas that share the experts of each layer, each measured by itself (default: as configured; with "
         "--search: all that training takes)");
    text(kDraw, "--gradient-seconds", options_.gradient_seconds,
         "time that a stage's gradients take over a link: a number, or one for each stage; a ring of d "
         "replicas needs 2 (d - 1) / d of it");
    number(kModel, "--data-latency", options_.data_latency,
           "latency of a sum over replicas, or an exchange of their experts out of a node, in seconds (default: that "
           "of a link, or of the link out of a node)");
    text(kModel, "--data-bandwidth", options_.data_bandwidth,
         "bytes per second of the link for both (default: as for --data-latency)");
    number(kModel, "--devices", options_.devices, "only combinations whose ranks x replicas equal this; 0: any");
  }

  void add_output() {
    text(kAnyJob, "--json", options_.json, "also write the result to this file");
    flag(kDraw, "--no-ops", options_.no_ops,
         "leave ops and instructions out of --json; for a thousand ranks they would take gigabytes");
    text(kAnyJob, "--svg", options_.svg, "also draw the schedule as an SVG picture in this file");
    number(kAnyJob, "--svg-end", options_.svg_end, "end of the picture's time axis (default: the end of the step)");
    text(kAnyJob, "--csv", options_.csv,
         "also write the order in PyTorch's text form to this file; under fill or a cap, W stands where the "
         "simulation ran it");
  }

  // What only a plan of a model has.
  void add_model() {
    text(kCosts, "--costs", options_.costs, "a cost model of 'twobp profile --json', instead of measuring");
    text(kModel, "--micro-batch-sizes", options_.micro_batch_sizes,
         "[list] samples per micro-batch (default: from --costs, or half, once and twice the configured "
         "number)");
    text(kModel, "--recompute", options_.recompute,
         "[list] recomputation in all layers except the first and the last: " + join(recompute_names()) +
             " (default: all, or only pipeline.recompute if that is configured)");
    text(kModel, "--gradients", options_.gradients,
         "[list] kept, streamed: see pipeline.gradients (default: as configured; auto: both)");
    text(kAnyJob, "--memory", options_.memory,
         "memory of each rank for everything, such as 80GiB; without a model: micro-batches that a rank may hold "
         "(default: no limit)");
    number(kModel, "--batch", options_.batch, "only combinations with this many samples per step; 0: any")
        ->capture_default_str();
    number(kModel, "--top", options_.top, "number of the best combinations to show", 1)->capture_default_str();
    flag(kModel, "--all", options_.all, "show all combinations that fit (slow: each is simulated)");
    flag(kAnyJob, "--search", options_.search,
         "also search for new schedules, with the placements of the best or given ones (rows 'auto')");
    number(kMeasure, "--seconds", options_.seconds, "how long to measure each size and recomputation")
        ->capture_default_str();
  }

  CLI::App& plan_;
  PlanOptions& options_;
  std::vector<std::pair<const CLI::Option*, unsigned>> jobs_;
};

std::string described_schedules() {
  constexpr size_t kNameColumn = 18;
  std::string text = "Schedules, for N ranks and M micro-batches:\n";
  for (const NamedSchedule& one : named_schedules())
    text += concat("  ", one.name, std::string(kNameColumn - one.name.size(), ' '), one.what, "\n");
  return text;
}

}  // namespace

void add_plan_command(CLI::App& app) {
  auto options = std::make_shared<PlanOptions>();
  CLI::App* plan = app.add_subcommand("plan",
                                      "Draw and time a schedule from given costs. With a configuration or "
                                      "--costs: compare all ways to run that model by predicted throughput, "
                                      "and say what 2BP gains; options marked [list] may then be lists, "
                                      "such as 2,4,8 or 2..8. Otherwise only --schedule and --p2 may be");
  const auto flags = std::make_shared<Flags>(*plan, *options);
  plan->footer(described_schedules());
  plan->callback([options, flags, plan] {
    check_alone("plan", find_launcher());
    const PlanJob job = job_of(*options);
    flags->check(job);
    check_files(*plan);
    if (job == kDraw) return plan_schedule(*options);
    plan_model(*options);
  });
}

}  // namespace twobp
