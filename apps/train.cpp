// `twobp train`: trains the model that a configuration describes.
#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <optional>

#include <CLI/CLI.hpp>

#include "apps/commands.h"
#include "apps/json_report.h"
#include "apps/print.h"
#include "apps/run_guard.h"
#include "apps/train_output.h"
#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/data/input_wait.h"
#include "twobp/models/model_type.h"
#include "twobp/nn/kernels/products/products.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/pipeline_shape.h"
#include "twobp/pipeline/stage.h"
#include "twobp/plan/partition/partition.h"
#include "twobp/train/build_model.h"
#include "twobp/train/check_config.h"
#include "twobp/train/checkpoint/checkpointer.h"
#include "twobp/train/gradients.h"
#include "twobp/train/trainer.h"
#include "twobp/train/update/update.h"
#include "twobp/train/variant.h"
#include "twobp/train/weights/save_model.h"
#include "twobp/train/weights/weight_files.h"
#include "twobp/transport/start.h"

namespace twobp {
namespace {

struct TrainOptions {
  std::string config;
  std::vector<std::string> overrides;
  std::string metrics;
  TraceOptions trace;
  bool resume = false;
  bool print_config = false;
};

void describe_run(Trainer& trainer) {
  Pipeline& pipeline = trainer.pipeline();
  const int64_t parameters = trainer.update().numel();
  std::vector<std::string> split;
  for (const int layers : pipeline.split()) split.push_back(std::to_string(layers));
  std::vector<double> seconds(pipeline.stages(), 0);
  std::vector<double> of_slice(pipeline.slices(), 0);
  for (size_t i = 0; i < pipeline.layer_costs().size(); ++i) {
    for (const LayerCost& cost : pipeline.layer_costs()[i]) {
      seconds[i % seconds.size()] += cost.seconds();
      of_slice[i / seconds.size()] += cost.seconds();
    }
  }
  const Variant variant = trainer.variant();
  print(
      "%.1fM parameters, %zu layers on %d stages (%s, the slowest %.2fx the mean), %s with p2 %s, "
      "%d micro-batches of %lld samples, %lld batches an epoch\n",
      static_cast<double>(parameters) / 1e6, pipeline.model().layers.size(), pipeline.stages(),
      join(split, "+").c_str(), imbalance(seconds), variant.schedule.name().c_str(),
      std::string(policy_name(variant.policy)).c_str(), trainer.micro_batches(),
      static_cast<long long>(trainer.config().pipeline.micro_batch_size),
      static_cast<long long>(trainer.loader().batches_per_epoch()));
  if (pipeline.slices() > 1) {
    std::vector<std::string> lengths;
    const auto& cuts = pipeline.cuts();
    for (size_t s = 1; s < cuts.size(); ++s) lengths.push_back(std::to_string(cuts[s] - cuts[s - 1]));
    print("each sequence in %d slices of %s positions, the slowest %.2fx the mean\n", pipeline.slices(),
          join(lengths, "+").c_str(), imbalance(of_slice));
  }
  if (pipeline.ranks() > 1) print("%s\n", to_text(trainer.run_ahead()).c_str());
  if (trainer.config().pipeline.gradients != "kept") print("%s\n", to_text(trainer.gradients()).c_str());
}

void warn_of_cap(Trainer& trainer) {
  const std::string warning = warning_of_cap(trainer.pipeline(), trainer.variant(), trainer.micro_batches());
  if (!warning.empty()) log_warning(warning);
}

void print_memory(const StepReport& report) {
  print("\npeak memory      ");
  for (int c = 0; c < kMemoryCategories; ++c) {
    print("%14s", std::string(category_name(static_cast<MemoryCategory>(c))).c_str());
  }
  print("%14s\n", "all");
  for (size_t s = 0; s < report.stage_memory.size(); ++s) {
    const MemoryUse& use = report.stage_memory[s];
    print("  stage %-9zu", s);
    for (const int64_t bytes : use.at_peak) print("%14s", format_bytes(static_cast<double>(bytes)).c_str());
    print("%14s\n", format_bytes(static_cast<double>(use.peak)).c_str());
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

// Only one process shows the output of the run.
class Output {
 public:
  Output(const TrainOptions& options, const Config& config, bool shows)
      : shows_(shows),
        metrics_(shows ? options.metrics : ""),
        progress_(config.train.steps, config.train.log_every, item_name(config.model.input().kind)),
        input_wait_(config.data.workers) {}

  bool shows() const { return shows_; }
  MetricsFile& metrics() { return metrics_; }

  void warn(const std::string& text) {
    if (!shows_) return;
    progress_.finish_line();
    log_warning(text);
  }

  void say(const std::string& text) {
    if (!shows_) return;
    progress_.finish_line();
    print("%s\n", text.c_str());
  }

  void step(const StepResult& result) {
    if (!shows_) return;
    for (const std::string& warning : result.warnings) warn(warning);
    progress_.show(result);
    const double in_step = result.report.begun_early ? result.input_wait : 0;
    if (const auto warning = input_wait_.after_step(result.input_wait, result.report.seconds() - in_step))
      warn(*warning);
  }

  // `held_out`: the evaluation after the step, if there was one.
  void record(const StepResult& result, const std::optional<Evaluation>& held_out) {
    if (shows_) metrics_.write(step_to_json(result, held_out));
  }

  void finish_line() {
    if (shows_) progress_.finish_line();
  }

 private:
  bool shows_;
  MetricsFile metrics_;
  Progress progress_;
  InputWait input_wait_;
};

void resume(Checkpointer& checkpointer, Trainer& trainer, Output& output) {
  for (const std::string& note : checkpointer.resume(trainer)) output.warn(note);
  if (trainer.steps_done() > 0) {
    output.say(concat("resumed after step ", trainer.steps_done()));
  } else {  // the first start of a run that is restarted until it is done
    output.say(concat("no checkpoint in ", trainer.config().save.checkpoints, " yet: starting from the beginning"));
  }
}

// The next step after `done` with an evaluation, a checkpoint, or the end of the run.
int64_t next_look(const Config& config, int64_t done) {
  int64_t next = config.train.steps;
  const auto every = [&](int64_t count) {
    if (count > 0) next = std::min(next, (done / count + 1) * count);
  };
  every(config.train.eval_every);
  if (!config.save.checkpoints.empty()) every(config.save.every);
  return next;
}

// Writes the weights as they are now: the model, or its adapters.
void save(Trainer& trainer, Output& output, const Processes& processes) {
  const Config& config = trainer.config();
  if (config.save.lora == "adapter") {
    save_adapter(config.save.model, config.model, trainer.weights(), config.save.dtype, processes);
    return;
  }
  const SaveModelOptions how = save_options(config, config.save.dtype);
  save_model(config.save.model, config.model, config.data.sequence, trainer.weights(), how, processes);
  const std::string warning = missing_tokenizer(how, config.save.model);
  if (!warning.empty()) output.warn(warning);
}

// Runs the trainer to its last step. Returns the exit code.
int run(const TrainOptions& options, Trainer& trainer, std::optional<Checkpointer>& checkpointer, Output& output,
        const Processes& processes) {
  const Config& config = trainer.config();
  const bool shows = output.shows();
  if (shows) {
    describe_run(trainer);
    warn_of_inputs(trainer);
    warn_of_cap(trainer);
  }
  if (options.resume) {
    resume(*checkpointer, trainer, output);
    if (shows) output.metrics().keep_until(trainer.steps_done());
  } else if (shows) {
    output.metrics().clear();  // only now, when nothing can stop this run from starting
  }
  TraceOutput trace(options.trace, trainer);
  catch_stop_signals();  // only now: until here, nothing would be lost
  trainer.stop_when([] { return stop_signal() != 0; });

  const auto evaluate = [&](const std::string& when) {
    const std::optional<Evaluation> held_out = trainer.evaluate();
    if (held_out) output.say(concat("held-out loss ", when, ": ", to_text(*held_out)));
    return held_out;
  };
  const std::optional<Evaluation> before =
      evaluate(trainer.steps_done() == 0 ? "before training" : concat("after step ", trainer.steps_done()));
  std::optional<Evaluation> after;
  StepResult result;  // of the last whole step
  while (trainer.steps_done() < config.train.steps && !trainer.stopping()) {
    trainer.run_ahead_until(next_look(config, trainer.steps_done()));
    StepResult next = trainer.step();
    if (next.given_up) break;
    result = std::move(next);
    output.step(result);
    trace.after_step();
    const int64_t done = trainer.steps_done();
    const bool last = done == config.train.steps;
    std::optional<Evaluation> held_out;
    if (!trainer.stopping() && (last || (config.train.eval_every > 0 && done % config.train.eval_every == 0)))
      held_out = evaluate(last ? "after training" : concat("after step ", done));
    output.record(result, held_out);  // before the checkpoint: a resumed run does not repeat the step
    if (checkpointer) checkpointer->after_step(trainer);
    if (last) after = held_out;
  }
  output.finish_line();
  // This comes first, because a run that is being stopped may not have much time.
  if (checkpointer) checkpointer->finish(trainer);
  trace.finish();
  const int signal = trainer.stopping() ? agreed_stop_signal(processes) : 0;
  if (signal != 0) {
    const int64_t done = trainer.steps_done();
    output.warn(concat(how_it_stops(signal), done == 0 ? std::string(" before the first step")
                                                       : concat(" after step ", done, " of ", config.train.steps,
                                                                checkpointer ? ", checkpoint written" : "")));
  } else {
    if (result.step == 0) after = evaluate("after training");  // a resumed run that was already done
    if (shows && before && after) print("held-out loss %.4f -> %.4f\n", before->loss, after->loss);
  }
  if (shows && result.step > 0) print_memory(result.report);
  if (!config.save.model.empty()) {
    trainer.with_averages([&] { trainer.update().with_masters([&] { save(trainer, output, processes); }); });
    output.say(concat("saved ", config.save.model));
  }
  return exit_code_of_signal(signal);
}

// Runs one process's part of the run, or that of one replica.
int train(const TrainOptions& options, const Config& config, World world) {
  const bool shows = world.is_first();
  const Processes processes(*world.processes, config.pipeline.timeout);
  std::optional<Trainer> trainer;  // outlives the checkpointer, which checks its folder before minutes of work
  std::optional<Checkpointer> checkpointer;
  if (processes.count() > 1) {  // before any work that only some of them might do
    check_agreement(processes, {{"save.checkpoints", config.save.checkpoints.empty() ? "empty" : "set"},
                                {"--resume", options.resume ? "given" : "not given"}});
  }
  if (!config.save.checkpoints.empty()) checkpointer.emplace(config.save, options.resume, processes);
  Output output(options, config, shows);
  try {
    trainer.emplace(config, std::move(world));
    return run(options, *trainer, checkpointer, output, processes);
  } catch (...) {
    RunGuard::get().failing();
    throw;
  }
}

int train(const TrainOptions& options) {
  if (options.print_config && options.config.empty() && options.overrides.empty()) {
    // The defaults have no data, so they are not checked as a run.
    print("%s\n", config_to_json(Config{}).c_str());
    return 0;
  }
  const Launcher launcher = find_launcher();
  RunGuard::get().started_by(launcher);
  const Config config = load_config(options.config, options.overrides);
  if (options.print_config) {
    print("%s\n", config_to_json(config).c_str());
    return 0;
  }
  if (!config.save.model.empty()) {
    const std::string tokenizer = tokenizer_of(config.data, config.model.input());
    const bool known = !config.data.text.empty() || !tokenizer.empty();
    check_save(config.save, config.model, known ? std::optional(tokenizer) : std::nullopt);
  }
  if (launcher.rank == 0 && !has_instructions_for(compute_dtype(config.train.precision))) {
    log_warning(concat("this CPU has no instructions for ", config.train.precision,
                       ": matrix products are computed in fp32, so it saves memory but no time here"));
  }
  TWOBP_CHECK(!config.save.checkpoints.empty() || !options.resume,
              "--resume needs save.checkpoints, the folder of checkpoints to continue from: set it");
  // The launchers' libraries wait for the other processes without a limit.
  std::optional<RunGuard::Deadline> in_launcher;
  if (launcher.started_many()) in_launcher.emplace(config.pipeline.timeout, "starting the run");
  int exit_code = 0;
  run_world(start_options(config.pipeline), launcher, [&](World world) {
    in_launcher.reset();
    RunGuard::get().watch(world, config.pipeline.timeout);
    const bool first = world.is_first();
    const int code = train(options, config, std::move(world));
    if (first || launcher.started_many()) exit_code = code;
  });
  if (launcher.started_many()) {  // from here to the end of the program
    static const auto* const at_exit = new RunGuard::Deadline(config.pipeline.timeout, "ending the run");
    static_cast<void>(at_exit);
  }
  return exit_code;
}

}  // namespace

void warn_of_inputs(const Trainer& trainer) {
  const std::string& from = trainer.config().model.from;
  if (!trainer.new_parameters().empty()) {
    log_warning(concat(from, " has no ", join(trainer.new_parameters()), ": they are initialized as in a new model"));
  }
  if (const auto& unused = trainer.unused_tensors(); !unused.empty()) {
    log_warning(concat(from, " has ", unused.size(), " tensors that the model does not use, such as ",
                       unused.front().substr(0, 100), ": they are neither trained nor saved"));
  }
}

void add_train_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<TrainOptions>();
  CLI::App* command = app.add_subcommand("train", "Train the model that a configuration describes");
  command->add_option("config", options->config, "JSON file; without it, the defaults and --set");
  command->add_option("--set", options->overrides, "Override a key: section.key=value")->take_all();
  command->add_option("--metrics", options->metrics, "File for one JSON object per step");
  command->add_option("--trace", options->trace.file, "File for a trace of chosen steps (https://ui.perfetto.dev)");
  command->add_option("--trace-steps", options->trace.steps,
                      "Steps to record: 5, or 3-5 (default: 2-4, or the last ones of a shorter run)");
  auto how = std::make_shared<std::string>();
  const CLI::Option* resume =
      command
          ->add_option("--resume", *how,
                       "Continue from the newest complete checkpoint in save.checkpoints, or start anew if there is "
                       "none; \"auto\" means the same")
          ->expected(0, 1)
          ->type_name("[auto]");
  command->add_flag("--print-config", options->print_config, "Print the whole configuration and stop");
  command->footer("Configuration keys:\n" + config_reference());
  command->callback([options, how, resume, command, &exit_code] {
    check_files(*command);
    options->resume = resume->count() > 0;
    if (!how->empty() && *how != "auto") {  // "--resume config.json": the file is not a value of --resume
      TWOBP_CHECK(options->config.empty(), "--resume takes no value or auto, not \"", *how, "\"");
      options->config = *how;
    }
    exit_code = train(*options);
  });
}

}  // namespace twobp
