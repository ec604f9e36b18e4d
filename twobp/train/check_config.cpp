#include "twobp/train/check_config.h"

#include <algorithm>

#include "twobp/config/settings.h"
#include "twobp/core/check.h"
#include "twobp/models/freeze.h"
#include "twobp/models/model.h"
#include "twobp/models/model_type.h"
#include "twobp/pipeline/pipeline_shape.h"
#include "twobp/plan/partition/partition.h"
#include "twobp/train/gradients.h"
#include "twobp/train/update/optimizer.h"

namespace twobp {
namespace {

// Whether the rule of pipeline.recompute makes W repeat F and I.
bool repeats_in_w(const std::string& rule) {
  return rule.ends_with("derivatives") || rule.ends_with("both");
}

void check_graphs(const Config& config) {
  if (!config.pipeline.graphs) return;
  const auto excludes = [](const char* key, const char* why) {
    fail("pipeline.graphs is set, but cannot be used with ", key, ": ", why, ". Set it to false.");
  };
  if (config.pipeline.device == "cpu") excludes("pipeline.device \"cpu\"", "a CPU has no graphs");
  if (config.pipeline.run_ahead == "on") excludes("pipeline.run_ahead \"on\"", "a graph holds one step of all ranks");
  if (config.pipeline.data_parallel > 1)
    excludes("pipeline.data_parallel", "gradients are summed over replicas while a step runs");
  const std::string why = config.model.type.type().no_graph(config.model.type);
  if (!why.empty()) excludes(concat("model.type \"", config.model.type.name(), "\"").c_str(), why.c_str());
}

// Checks what pipeline.device does not support yet.
void check_device(const Config& config) {
  const std::string& device = config.pipeline.device;
  TWOBP_CHECK(!config.pipeline.gpu_parts || device != "cpu",
              "pipeline.gpu_parts is set, but pipeline.device is \"cpu\": set that to \"cuda\", or gpu_parts "
              "to false.");
  TWOBP_CHECK(config.pipeline.sums != "nccl" || device != "cpu",
              "pipeline.sums is \"nccl\", but pipeline.device is \"cpu\": set that to \"cuda\", or sums to "
              "\"auto\".");
  check_graphs(config);
  if (device == "cpu") return;
  const std::string why = config.model.type.type().no_device(config.model.type);
  TWOBP_CHECK(why.empty(), "pipeline.device is \"", device, "\", but this model (\"", config.model.type.name(),
              "\") runs on CPUs alone: ", why, ". Set it to \"cpu\".");
}

void check_gradients(const Config& config) {
  for (const std::string& rule : config.pipeline.recompute) {
    TWOBP_CHECK(config.pipeline.stash == "full" || !repeats_in_w(rule), "pipeline.stash is \"", config.pipeline.stash,
                "\", but pipeline.recompute has \"", rule,
                "\", whose W repeats F and I from what is kept: set stash to \"full\", or recompute activations.");
  }
  if (config.pipeline.gradients != "streamed") return;
  const std::string why = why_gradients_are_kept(config);
  TWOBP_CHECK(why.empty(), "pipeline.gradients is \"streamed\", but every stage keeps its gradients: ", why,
              ". Set it to \"auto\" or \"kept\".");
}

void check_optimizer(const OptimizerConfig& optimizer) {
  const ParameterGroups groups(optimizer);  // throws for entries that are none
  const OptimizerConfig usual;
  const bool sgd = optimizer.type == "sgd";
  const char* const adam = "optimizer.type \"adam\", \"adamw\" or \"muon\"";
  check_used(!sgd, "optimizer.beta1", optimizer.beta1, usual.beta1, adam);
  check_used(!sgd, "optimizer.beta2", optimizer.beta2, usual.beta2, adam);
  check_used(!sgd, "optimizer.eps", optimizer.eps, usual.eps, adam);
  check_used(sgd, "optimizer.momentum", optimizer.momentum, usual.momentum, "optimizer.type \"sgd\"");
  check_used(optimizer.type == "muon", "optimizer.muon_momentum", optimizer.muon_momentum, usual.muon_momentum,
             "optimizer.type \"muon\"");
  const bool wsd = optimizer.schedule == "wsd";
  check_used(wsd, "optimizer.decay", optimizer.decay, usual.decay, "optimizer.schedule \"wsd\"");
  check_used(wsd || optimizer.schedule == "linear" || optimizer.schedule == "cosine", "optimizer.min_lr",
             optimizer.min_lr, usual.min_lr, "optimizer.schedule \"linear\", \"cosine\" or \"wsd\"");
  TWOBP_CHECK(optimizer.min_lr <= optimizer.lr, "optimizer.min_lr (", optimizer.min_lr, ") is above optimizer.lr (",
              optimizer.lr, "): the learning rate falls from lr to min_lr.");
}

// Checks what replicas that share experts cannot do yet.
void check_experts(const Config& config) {
  const int experts = config.pipeline.experts;
  if (experts == 1) return;
  TWOBP_CHECK(config.pipeline.data_parallel % experts == 0, "pipeline.experts is ", experts,
              ", but pipeline.data_parallel is ", config.pipeline.data_parallel,
              ": groups of replicas share experts, so make that a multiple of it.");
  const auto excludes = [&](const std::string& key, const char* instead) {
    fail("pipeline.experts is ", experts, ", which cannot be used with ", key, " yet: ", instead, ".");
  };
  if (config.pipeline.device != "cpu")
    excludes(concat("pipeline.device \"", config.pipeline.device, "\""), "set it to \"cpu\"");
  for (const std::string& rule : config.pipeline.recompute) {
    if (repeats_in_w(rule)) excludes(concat("pipeline.recompute \"", rule, "\""), "recompute activations, or nothing");
  }
}

void check_training(const Config& config) {
  check_experts(config);
  check_used(!config.save.model.empty(), "save.dtype", config.save.dtype, SaveConfig().dtype, "save.model");
  check_used(config.train.precision == "fp16", "train.loss_scale", config.train.loss_scale, TrainConfig().loss_scale,
             "train.precision \"fp16\"");
  check_used(config.pipeline.schedule != "auto", "pipeline.p2", config.pipeline.p2, PipelineConfig().p2,
             "a named or written schedule");
  check_device(config);
  check_gradients(config);
  check_slices(config, config.pipeline.slices);
  check_optimizer(config.optimizer);
  TWOBP_CHECK(config.train.eval_every == 0 || config.data.held_out > 0, "train.eval_every is ", config.train.eval_every,
              ", but data.held_out is 0, so there is nothing to evaluate on: set data.held_out above 0, or "
              "train.eval_every to 0.");
}

// An adapter is saved for PEFT, which adds it to the model that it was trained with.
void check_saved_adapter(const Config& config) {
  const ModelConfig& model = config.model;
  if (config.save.lora == "merged") return;
  TWOBP_CHECK(model.lora > 0, "save.lora is \"", config.save.lora,
              "\", but model.lora is 0: there is no adapter to save.");
  TWOBP_CHECK(!model.from.empty(), "save.lora is \"", config.save.lora,
              "\", but model.from is empty, so the model of the adapter would not be saved: set save.lora to "
              "merged.");
  const std::vector<std::string>& excluded = model.type.type().peft_excludes;
  for (const std::string& target : model.lora_targets) {
    if (names_experts(target)) continue;
    const std::string last = target.substr(target.rfind('.') + 1);
    TWOBP_CHECK(std::find(excluded.begin(), excluded.end(), last) == excluded.end(), "save.lora is \"",
                config.save.lora, "\", but transformers and PEFT use no adapter of ", last, " in a ", model.type.name(),
                ": remove ", target, " from model.lora_targets, or set save.lora to merged.");
  }
}

// Before ranks are made for stages that get no layer.
void check_layers(const Config& config) {
  if (ScheduleSource::is_file(config.pipeline.schedule)) return;  // read for a run
  check_stages(build_model(config.model).layers.size(), pipeline_shape(config.pipeline).rank_of_stage);
}

// The program of a captured model is for micro-batches of one size.
void check_captured(const Config& config, const ModelInput& input) {
  if (input.kind != InputKind::kFields || input.fields.empty() || input.fields.front().sizes.empty()) return;
  const std::vector<int64_t>& sizes = input.fields.front().sizes;
  TWOBP_CHECK(config.pipeline.micro_batch_size == sizes[0], "pipeline.micro_batch_size is ",
              config.pipeline.micro_batch_size, ", but the model was captured with micro-batches of ", sizes[0],
              ": set it to that, or capture the model again.");
  TWOBP_CHECK(!config.data.arrays.empty() || sizes.size() < 2 || config.data.sequence == sizes[1], "data.sequence is ",
              config.data.sequence, ", but the model was captured with sequences of ",
              sizes.at(sizes.size() < 2 ? 0 : 1), ": set it to that, or capture the model again.");
}

// An older bundle does not say which parameters are matrices.
void check_muon(const Config& config) {
  if (config.optimizer.type != "muon") return;
  const auto& groups = config.optimizer.groups;
  const bool named = std::any_of(groups.begin(), groups.end(),
                                 [](const std::string& group) { return group.find("rule=muon") != std::string::npos; });
  TWOBP_CHECK(named || !last_matrix(build_model(config.model)).empty(),
              "optimizer.type is \"muon\", but no parameter of the model is a matrix that multiplies, so Muon would "
              "update nothing: set it to \"adamw\". If the model was captured before bundles named their matrices, "
              "capture it again.");
}

void check_precision(const Config& config) {
  const ModelConfig& model = config.model;
  const std::string captured = model.type.type().captured_for(model.type);
  TWOBP_CHECK(captured.empty() || config.train.precision == captured, "train.precision is \"", config.train.precision,
              "\", but the model was captured for \"", captured,
              "\": set it to that, or capture the model again with the other precision.");
  TWOBP_CHECK(!captured.empty() || model.type.type().reduced_precision || config.train.precision == "fp32",
              "train.precision is \"", config.train.precision, "\", but model.type \"", model.type.name(),
              "\" computes only in fp32: set it to \"fp32\".");
}

}  // namespace

void check_slices(const Config& config, int slices) {
  if (slices == 1) return;
  const std::string why = config.model.type.type().no_slices(config.model.type);
  TWOBP_CHECK(why.empty(), "pipeline.slices is ", slices, ", but this model (\"", config.model.type.name(),
              "\") takes no slices: ", why, ". Set it to 1.");
  for (const std::string& text : config.pipeline.recompute) {
    TWOBP_CHECK(!repeats_in_w(text), "pipeline.slices is ", slices, ", but pipeline.recompute has \"", text,
                "\": a slice's I adds to gradients of earlier slices, so W cannot repeat it. Use activations "
                "or none, or set slices to 1.");
  }
}

void check_whole_batches(const Config& config, int micro_batches, const DataSplit& data) {
  if (config.pipeline.experts == 1) return;
  const int64_t replica = micro_batches * config.pipeline.micro_batch_size;
  const int64_t batch = config.pipeline.data_parallel * replica;
  const auto check = [&](const Dataset* samples, const char* what) {
    const int64_t rest = samples == nullptr ? 0 : samples->size() % batch;
    TWOBP_CHECK(rest == 0 || rest > batch - config.pipeline.micro_batch_size, "pipeline.experts is ",
                config.pipeline.experts, ", but the last batch of the ", what, " has ", rest, " of ", batch,
                " samples, so replicas would have different numbers of micro-batches: use a multiple of ", batch,
                " samples");
  };
  check(data.train.get(), "training data");
  check(data.held_out.get(), "held-out data");
}

void check_experts_of_model(const Config& config, const ModelSpec& model) {
  const int experts = config.pipeline.experts;
  if (experts == 1) return;
  const bool any = std::ranges::any_of(model.layers, [&](const LayerSpec& spec) {
    const auto layer = spec.make();  // allocates nothing
    return std::ranges::any_of(parameters_of(*layer), [&](const Parameter* one) { return one->share().of == experts; });
  });
  TWOBP_CHECK(any, "pipeline.experts is ", experts,
              ", but no layer of the model has experts that replicas can share (those of a captured module cannot): "
              "set it to 1");
}

void check_contradictions_without_data(const Config& config) {
  check_model(config.model);
  check_pipeline(config.pipeline);
  check_layers(config);
  check_precision(config);
  check_muon(config);
  check_training(config);
}

void check_contradictions(const Config& config) {
  check_model(config.model);
  const ModelInput input = config.model.input();
  check_data(config.data, input);
  TWOBP_CHECK(input.longest == 0 || config.data.sequence <= input.longest, "data.sequence (", config.data.sequence,
              ") is longer than the model's ", input.longest,
              " positions: shorten it, or for a new model set model.positions to as many.");
  check_captured(config, input);
  check_pipeline(config.pipeline);
  check_saved_adapter(config);
  check_layers(config);
  check_precision(config);
  check_muon(config);
  check_training(config);
}

}  // namespace twobp
