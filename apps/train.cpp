#include "apps/train.h"

#include <array>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <memory>
#include <optional>

#include "apps/json_report.h"
#include "apps/log.h"
#include "apps/metrics_file.h"
#include "apps/progress.h"
#include "apps/trace_options.h"
#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/nn/kernels/gemm.h"
#include "twobp/train/architecture.h"
#include "twobp/train/build_model.h"
#include "twobp/train/checkpointer.h"
#include "twobp/train/input_wait.h"
#include "twobp/train/lora.h"
#include "twobp/train/save_model.h"
#include "twobp/train/trainer.h"

namespace twobp {
namespace {

constexpr int kInterrupted = 130;  // as shells report a program ended by Ctrl-C

std::atomic<int> interrupted{0};

// The first Ctrl-C ends the run after the step at hand, the second at once.
void on_interrupt(int) {
  if (interrupted.exchange(1) != 0) _exit(kInterrupted);
}

struct TrainOptions {
  std::string config;
  std::vector<std::string> overrides;
  std::string metrics;
  TraceOptions trace;
  bool resume = false;
  bool print_config = false;
};

void describe(Trainer& trainer) {
  Pipeline& pipeline = trainer.pipeline();
  int64_t parameters = 0;
  for (const Parameter* weight : trainer.weights()) parameters += weight->numel();
  std::vector<std::string> split;
  for (const int layers : pipeline.split()) split.push_back(std::to_string(layers));
  std::vector<double> seconds;
  for (const auto& stage : pipeline.stage_costs()) {
    seconds.push_back(0);
    for (const LayerCost& cost : stage) seconds.back() += cost.seconds();
  }
  const Variant variant = trainer.variant();
  std::printf(
      "%.1fM parameters, %zu layers on %d stages (%s, the slowest %.2fx the mean), %s with p2 %s, "
      "%d micro-batches of %lld, %lld batches an epoch\n",
      static_cast<double>(parameters) / 1e6, pipeline.model().layers.size(), pipeline.stages(),
      join(split, "+").c_str(), imbalance(seconds), variant.schedule.name().c_str(),
      std::string(policy_name(variant.policy)).c_str(), trainer.micro_batches(),
      static_cast<long long>(trainer.config().pipeline.micro_batch_size),
      static_cast<long long>(trainer.loader().batches_per_epoch()));
}

void print_memory(const StepReport& report) {
  std::printf("\npeak memory      ");
  for (int c = 0; c < kMemoryCategories; ++c) {
    std::printf("%14s", std::string(category_name(static_cast<MemoryCategory>(c))).c_str());
  }
  std::printf("%14s\n", "all");
  for (size_t s = 0; s < report.stage_memory.size(); ++s) {
    const MemoryUse& use = report.stage_memory[s];
    std::printf("  stage %-9zu", s);
    for (const int64_t bytes : use.at_peak)
      std::printf("%14s", format_bytes(static_cast<double>(bytes)).c_str());
    std::printf("%14s\n", format_bytes(static_cast<double>(use.peak)).c_str());
  }
}

void resume(Checkpointer& checkpointer, Trainer& trainer) {
  for (const std::string& note : checkpointer.resume(trainer)) log_warning(note);
  if (trainer.steps_done() > 0) {
    std::printf("resumed after step %lld\n", static_cast<long long>(trainer.steps_done()));
  } else {  // the first start of a run that is restarted until it is done
    std::printf("no checkpoint in %s yet: starting from the beginning\n",
                trainer.config().save.checkpoints.c_str());
  }
}

std::string to_text(const Evaluation& held_out) {
  std::array<char, 64> text{};
  if (held_out.accuracy) {
    std::snprintf(text.data(), text.size(), "%.4f, accuracy %.2f%%", held_out.loss, 100 * *held_out.accuracy);
  } else {
    std::snprintf(text.data(), text.size(), "%.4f", held_out.loss);
  }
  return text.data();
}

int train(const TrainOptions& options) {
  if (options.print_config && options.config.empty() && options.overrides.empty()) {
    std::printf("%s\n", config_to_json(Config{}).c_str());  // the defaults: no data yet, so not a run
    return 0;
  }
  const Config config = load_config(options.config, options.overrides);
  if (options.print_config) {
    std::printf("%s\n", config_to_json(config).c_str());
    return 0;
  }
  if (!config.save.model.empty()) check_save_model(config.save.model, config.model);
  if (!has_instructions_for(compute_dtype(config.train.precision))) {
    log_warning(concat("this CPU has no instructions for ", config.train.precision,
                       ": matrix products are computed in fp32, so it saves memory but no time here"));
  }
  std::optional<Checkpointer> checkpointer;
  if (!config.save.checkpoints.empty()) checkpointer.emplace(config.save, options.resume);
  TWOBP_CHECK(checkpointer || !options.resume,
              "--resume goes on from the newest checkpoint in save.checkpoints, which is not set");
  MetricsFile metrics(options.metrics);
  Trainer trainer(config);
  describe(trainer);
  if (config.pipeline.replan > 0 && reorders(trainer.variant())) {
    log_warning(concat("pipeline.replan is ", config.pipeline.replan, ", but ", config.pipeline.schedule,
                       " gives up the order of micro-batches, so that any other plan would change bits: it "
                       "stays as it is"));
  }
  warn_of_new_parameters(trainer);
  if (options.resume) {
    resume(*checkpointer, trainer);
    metrics.keep_until(trainer.steps_done());
  } else {
    metrics.clear();  // now that nothing stands in the way of this run
  }
  TraceOutput trace(options.trace, trainer);
  std::signal(SIGINT, on_interrupt);
  std::signal(SIGTERM, on_interrupt);

  const auto evaluate = [&](const char* when) {
    const std::optional<Evaluation> held_out = trainer.evaluate();
    if (held_out) std::printf("held-out loss %s: %s\n", when, to_text(*held_out).c_str());
    std::fflush(stdout);
    return held_out;
  };
  const std::optional<Evaluation> before = evaluate(
      trainer.steps_done() == 0 ? "before training" : concat("after step ", trainer.steps_done()).c_str());
  Progress progress(config.train.steps, config.train.log_every,
                    item_name(architecture(config.model.type).input));
  InputWait input_wait(config.data.workers);
  StepResult result;
  while (trainer.steps_done() < config.train.steps && interrupted == 0) {
    result = trainer.step();
    progress.show(result);
    if (const auto warning = input_wait.after_step(result.input_wait, result.report.seconds())) {
      progress.finish_line();
      log_warning(*warning);
    }
    if (result.replan) {
      progress.finish_line();
      log_warning(concat("step ", result.step, ": ", to_text(*result.replan)));
    }
    metrics.write(step_to_json(result));
    trace.after_step(result);
    if (checkpointer) checkpointer->after_step(trainer);
    const bool last = trainer.steps_done() == config.train.steps;
    if (config.train.eval_every > 0 && trainer.steps_done() % config.train.eval_every == 0 && !last) {
      progress.finish_line();
      evaluate(concat("after step ", trainer.steps_done()).c_str());
    }
  }
  progress.finish_line();
  trace.finish();
  if (checkpointer) checkpointer->finish(trainer);
  if (interrupted != 0) {
    log_warning(concat("interrupted after step ", trainer.steps_done(), " of ", config.train.steps));
  } else {
    const std::optional<Evaluation> after = evaluate("after training");
    if (before && after) std::printf("held-out loss %.4f -> %.4f\n", before->loss, after->loss);
  }
  if (result.step > 0) print_memory(result.report);
  if (!config.save.model.empty()) {
    if (config.save.lora == "adapter") {
      save_adapter(config.save.model, config.model, trainer.weights());
    } else {
      save_model(config.save.model, config.model, config.data.sequence, trainer.weights(),
                 {.dtype = config.save.dtype});
    }
    std::printf("saved %s\n", config.save.model.c_str());
  }
  return interrupted != 0 ? kInterrupted : 0;
}

}  // namespace

void warn_of_new_parameters(const Trainer& trainer) {
  if (trainer.new_parameters().empty()) return;
  log_warning(concat(trainer.config().model.from, " has no ", join(trainer.new_parameters()),
                     ": they start as those of a new model"));
}

void add_train_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<TrainOptions>();
  CLI::App* command = app.add_subcommand("train", "Train the model that a configuration describes");
  command->add_option("config", options->config, "JSON file; without it, the defaults and --set");
  command->add_option("--set", options->overrides, "Override a key: section.key=value")->take_all();
  command->add_option("--metrics", options->metrics, "File for one JSON object a step");
  add_trace_options(*command, options->trace);
  command->add_flag("--resume", options->resume,
                    "Go on from the newest checkpoint in save.checkpoints, or start if there is none");
  command->add_flag("--print-config", options->print_config, "Print the whole configuration and stop");
  command->footer("Configuration keys:\n" + config_reference());
  command->callback([options, &exit_code] { exit_code = train(*options); });
}

}  // namespace twobp
