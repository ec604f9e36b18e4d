#include "apps/trace_options.h"

#include <cerrno>
#include <cstring>
#include <fstream>

#include <CLI/CLI.hpp>

#include "apps/log.h"
#include "apps/print.h"
#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/trace/timeline.h"
#include "twobp/trace/trace.h"
#include "twobp/train/variant.h"

namespace twobp {
namespace {

// A missing folder should be reported before hours of training, not after.
void check_writable(const std::string& path) {
  if (path.empty()) return;
  const std::ofstream file(path, std::ios::app);
  TWOBP_CHECK(file.good(), "cannot write ", path, ": ", std::strerror(errno));
}

Trace describe(Trainer& trainer) {
  const Config& config = trainer.config();
  const Variant& variant = trainer.variant();
  std::vector<std::string> split;
  for (const int layers : trainer.pipeline().split()) split.push_back(std::to_string(layers));
  const int64_t size = config.pipeline.micro_batch_size;
  Trace trace;
  trace.title = concat(config.model.type.name(), " on ", trainer.pipeline().stages(), " stages, ", variant.schedule,
                       " with p2 ", policy_name(variant.policy));
  trace.facts = {
      {"micro-batches", concat(trainer.micro_batches(), ", of ", size, size == 1 ? " sample each" : " samples each")},
      {"layers", concat(trainer.pipeline().model().layers.size(), " (", join(split, " + "), ")")},
      {"memory cap", config.pipeline.memory_cap},
      {"threads per rank", std::to_string(config.pipeline.threads)}};
  return trace;
}

}  // namespace

void add_trace_options(CLI::App& command, TraceOptions& options) {
  command.add_option("--trace", options.trace, "File for a trace of chosen steps (https://ui.perfetto.dev)");
  command.add_option("--timeline", options.timeline, "HTML file that draws chosen steps as they ran");
  command.add_option("--trace-steps", options.steps,
                     "Steps to record: 5, or 3-5 (default: 2-4, or the last ones of a shorter run)");
}

TraceOutput::TraceOutput(const TraceOptions& options, Trainer& trainer) : options_(options), trainer_(&trainer) {
  if (options.trace.empty() && options.timeline.empty()) {
    TWOBP_CHECK(options.steps.empty(), "--trace-steps needs --trace FILE or --timeline FILE");
    return;
  }
  if (trainer.steps_done() >= trainer.config().train.steps) return;  // a resumed run that was already done
  steps_ = choose_trace_steps(options.steps, {trainer.steps_done() + 1, trainer.config().train.steps});
  if (trainer.world().is_first()) {
    check_writable(options.trace);
    check_writable(options.timeline);
  }
  recorder_ = std::make_shared<TraceRecorder>(steps_);
  trainer.add_observer(recorder_);
}

void TraceOutput::after_step() {
  if (recorder_ && !written_ && trainer_->world().is_first() && recorder_->complete()) write();
}

void TraceOutput::finish() {
  if (!recorder_ || !trainer_->world().is_first()) return;
  const auto& reports = recorder_->reports();
  if (reports.empty()) {
    log_warning(concat("nothing traced: the run ended before step ", steps_.first));
    return;
  }
  if (!written_) write();
  for (const std::string& path : {options_.trace, options_.timeline}) {
    if (path.empty()) continue;
    print("steps %lld to %lld are drawn in %s\n", static_cast<long long>(reports.front().step),
          static_cast<long long>(reports.back().step), path.c_str());
  }
}

void TraceOutput::write() {
  Trace trace = describe(*trainer_);
  trace.steps = recorder_->reports();
  const Pipeline& pipeline = trainer_->pipeline();
  trace.run = traced_run(pipeline, make_plan(pipeline, trainer_->variant(), trainer_->micro_batches()));
  if (!options_.trace.empty()) write_text(options_.trace, trace_json(trace));
  if (!options_.timeline.empty()) write_text(options_.timeline, timeline_html(trace));
  written_ = true;
}

}  // namespace twobp
