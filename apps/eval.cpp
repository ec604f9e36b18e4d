// `twobp eval`: held-out loss, perplexity and accuracy of a model, computed on the pipeline.
#include <cmath>
#include <memory>

#include <CLI/CLI.hpp>

#include "apps/commands.h"
#include "apps/json_report.h"
#include "apps/print.h"
#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/core/text.h"
#include "twobp/models/model_type.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/pipeline/pipeline_shape.h"
#include "twobp/train/trainer.h"
#include "twobp/transport/start.h"

namespace twobp {
namespace {

struct EvalOptions {
  std::string config;
  std::vector<std::string> overrides;
  std::string json;
};

void eval(const EvalOptions& options) {
  check_alone("eval", find_launcher());
  std::vector<std::string> overrides = {"train.eval_batches=0"};  // all of them by default
  overrides.insert(overrides.end(), options.overrides.begin(), options.overrides.end());
  Config config = load_config(options.config, overrides);
  config.pipeline.data_parallel = 1;
  config.model.freeze = {"*"};  // no gradients, no optimizer state
  // A forward pass needs no schedule file, and it may be gone.
  if (ScheduleSource::is_file(config.pipeline.schedule)) {
    config.pipeline.schedule = "gpipe";
    config.pipeline.ranks = config.pipeline.stages = 0;
    config.pipeline.split.clear();
    config.pipeline.recompute.clear();
  }
  Trainer trainer(config);
  warn_of_inputs(trainer);
  const double begin = now_seconds();
  const std::optional<Evaluation> held_out = trainer.evaluate();
  const double seconds = now_seconds() - begin;
  TWOBP_CHECK(held_out, "there is no held-out data: set data.held_out above 0");
  // Perplexity is for models that predict tokens. Models of pictures only have an accuracy.
  const InputKind input = config.model.input().kind;
  const bool tokens = input == InputKind::kTokens || input == InputKind::kMaskedTokens;
  const double perplexity = std::exp(held_out->loss);
  print("held-out loss %.6f", held_out->loss);
  if (tokens) print(", perplexity %.3f", perplexity);
  if (held_out->accuracy) print(", accuracy %.2f%%", 100 * *held_out->accuracy);
  print(", %.1f s\n", seconds);
  if (options.json.empty()) return;
  nlohmann::json report = {{"loss", held_out->loss}, {"seconds", seconds}, {"machine", machine_to_json()}};
  if (tokens) report["perplexity"] = perplexity;
  if (held_out->accuracy) report["accuracy"] = *held_out->accuracy;
  write_text(options.json, report.dump(2) + "\n");
}

}  // namespace

void add_eval_command(CLI::App& app) {
  auto options = std::make_shared<EvalOptions>();
  CLI::App* command =
      app.add_subcommand("eval", "Compute the loss, perplexity and accuracy of a model on all held-out data");
  command->add_option("config", options->config,
                      "JSON file, as for train; model.from is the model (without it: random weights)");
  command->add_option("--set", options->overrides, "Override a key: section.key=value")->take_all();
  command->add_option("--json", options->json, "File for the result as JSON");
  command->callback([options] { eval(*options); });
}

}  // namespace twobp
