// What a configuration may say: ranges and choices of single keys, from the table, then contradictions
// between keys. Whatever needs the data or the model itself (token ids, more stages than layers) is checked
// where that is.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <string>
#include <system_error>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/nn/models/recompute.h"
#include "twobp/train/config/config.h"
#include "twobp/train/config/config_keys.h"
#include "twobp/train/data/data.h"
#include "twobp/train/model/architecture.h"
#include "twobp/train/model/build_model.h"

namespace twobp {
namespace {

void check_key(const ConfigKey& key, Config& config) {
  std::visit(
      [&](const auto* value) {
        using Value = std::remove_cv_t<std::remove_pointer_t<decltype(value)>>;
        if constexpr (std::is_same_v<Value, std::string>) {
          const auto& choices = key.allowed.choices;
          Config defaults;
          const bool unset = value->empty() && std::get<std::string*>(key.field(defaults))->empty();
          const bool known = std::find(choices.begin(), choices.end(), *value) != choices.end();
          const bool file = !key.allowed.file.empty() && value->ends_with(key.allowed.file);
          TWOBP_CHECK(choices.empty() || unset || known || file, key.full_name(), " is \"", *value,
                      "\", which is unknown: did you mean \"", nearest(*value, choices), "\"? It is ",
                      key.allowed.text(), ".");
        } else if constexpr (std::is_arithmetic_v<Value> && !std::is_same_v<Value, bool>) {
          TWOBP_CHECK(key.allowed.contains(static_cast<double>(*value)), key.full_name(), " is ", *value,
                      ", but must be ", std::is_integral_v<Value> ? "an integer " : "a finite number ",
                      key.allowed.text(), ".");
        }
      },
      key.field(config));
}

void check_adapters(const Config& config) {
  const ModelConfig& model = config.model;
  const Architecture& of = architecture(model.type);
  TWOBP_CHECK(of.lora || model.lora == 0, "model.lora is ", model.lora, ", but model.type \"", model.type,
              "\" takes no adapters.");
  TWOBP_CHECK(model.lora == 0 || !model.lora_targets.empty(), "model.lora is ", model.lora,
              ", but model.lora_targets is empty: name projections, such as q_proj.");
  TWOBP_CHECK(model.lora > 0 || model.adapter.empty(),
              "model.adapter is set, but model.lora is 0: set it to the adapter's rank.");
  TWOBP_CHECK(model.lora > 0 || config.save.lora == "merged", "save.lora is \"", config.save.lora,
              "\", but model.lora is 0: there is no adapter to save.");
  TWOBP_CHECK(of.reduced_precision || config.train.precision == "fp32", "train.precision is \"",
              config.train.precision, "\", but model.type \"", model.type, "\" computes in fp32 alone.");
}

// Which layers there are shows when the model is built.
void check_recompute(const PipelineConfig& pipeline) {
  try {
    for (const std::string& text : pipeline.recompute) {
      const RecomputeRule rule = parse_recompute_rule(text);
      TWOBP_CHECK(rule.stage < 0 || !pipeline.split.empty(), "\"", text,
                  "\" needs pipeline.split: without it stages are cut by measured cost, which recomputation "
                  "changes. Set pipeline.split, or name layers by a pattern");
    }
  } catch (const Error& error) {
    fail("pipeline.recompute: ", error.what(), ".");
  }
}

void check_pipeline(const PipelineConfig& pipeline) {
  parse_memory_cap(pipeline.memory_cap);
  parse_bucket(pipeline.bucket);
  check_recompute(pipeline);
  // What is in a file shows when it is read, by who runs it.
  const bool file = ScheduleSource::is_file(pipeline.schedule);
  const int stages = file ? pipeline.stages : pipeline_shape(pipeline).stages;
  if (pipeline.split.empty() || stages == 0) return;
  TWOBP_CHECK(std::cmp_equal(pipeline.split.size(), stages), "pipeline.split lists ", pipeline.split.size(),
              " stages, but pipeline.stages is ", stages,
              ": give one number of layers per stage, or [] to split by measured cost.");
  for (size_t stage = 0; stage < pipeline.split.size(); ++stage) {
    TWOBP_CHECK(pipeline.split[stage] >= 1, "pipeline.split gives stage ", stage, " ", pipeline.split[stage],
                " layers, but every stage needs at least 1.");
  }
}

void check_graphs(const Config& config) {
  if (!config.pipeline.graphs) return;
  const auto excludes = [](const char* key, const char* why) {
    fail("pipeline.graphs is set, but not with ", key, ": ", why, ". Set it to false.");
  };
  if (config.pipeline.device == "cpu") excludes("pipeline.device \"cpu\"", "a CPU has no graphs");
  if (config.pipeline.run_ahead == "on")
    excludes("pipeline.run_ahead \"on\"", "a graph holds one step of all ranks");
  if (config.model.type == "bert")
    excludes("model.type \"bert\"", "its head sees the positions to be predicted, other ones every time");
  if (config.model.dropout > 0 || config.model.attention_dropout > 0)
    excludes("dropout", "masks are drawn on the host, for every step anew");
}

// What pipeline.device does not do yet.
void check_device(const Config& config) {
  const std::string& device = config.pipeline.device;
  TWOBP_CHECK(!config.pipeline.gpu_parts || device != "cpu",
              "pipeline.gpu_parts is set, but pipeline.device is \"cpu\": set that to \"cuda\", or gpu_parts "
              "to false.");
  check_graphs(config);
  if (device == "cpu") return;
  TWOBP_CHECK(config.pipeline.data_parallel == 1, "pipeline.device is \"", device,
              "\", but replicas (pipeline.data_parallel ", config.pipeline.data_parallel,
              ") are for CPUs so far: set one of the two back.");
  const bool runs_again = std::any_of(
      config.pipeline.recompute.begin(), config.pipeline.recompute.end(),
      [](const std::string& mode) { return mode.ends_with("derivatives") || mode.ends_with("both"); });
  TWOBP_CHECK(!runs_again || config.model.type != "resnet", "pipeline.device is \"", device,
              "\", where W may run beside F: a ResNet's F cannot run again in W there, since both use its "
              "running statistics: set pipeline.recompute to activations or none.");
  TWOBP_CHECK(
      config.pipeline.replan == 0 || !config.pipeline.graphs,
      "pipeline.graphs is set, and a step that is put in as a graph does not tell what its parts took, "
      "by which pipeline.replan goes: set one of them to 0 or false.");
}

void check_stealing(const PipelineConfig& pipeline) {
  if (!pipeline.p2_stealing) return;
  const auto excludes = [](const char* key, const char* why, const char* instead) {
    fail("pipeline.p2_stealing is set, and so is ", key, ", but ", why, ": set one of them to ", instead,
         ".");
  };
  if (pipeline.run_ahead == "on")
    excludes("pipeline.run_ahead", "a rank that runs ahead takes nothing off others", "its default");
  if (pipeline.data_parallel > 1)
    excludes("pipeline.data_parallel", "with replicas a rank sums its own gradients at that time",
             "its default");
  if (pipeline.device != "cpu")
    excludes("pipeline.device", "the memory of a device is out of other ranks' reach", "its default");
  if (pipeline.p2_batching != "loop")
    excludes("pipeline.p2_batching", "ranks take single micro-batches off each other", "its default");
}

void check_training(const Config& config) {
  check_device(config);
  check_stealing(config.pipeline);
  TWOBP_CHECK(config.optimizer.min_lr <= config.optimizer.lr, "optimizer.min_lr (", config.optimizer.min_lr,
              ") is above optimizer.lr (", config.optimizer.lr,
              "): the learning rate falls from lr to min_lr.");
  TWOBP_CHECK(config.train.eval_every == 0 || config.data.held_out > 0, "train.eval_every is ",
              config.train.eval_every,
              ", but data.held_out is 0, so there is nothing to evaluate on: set data.held_out above 0, or "
              "train.eval_every to 0.");
}

}  // namespace

void check_config(const Config& config) {
  Config copy = config;  // the table hands out pointers to change through
  for (const auto& key : config_keys()) check_key(key, copy);
  architecture(config.model.type).check(config.model);
  check_data(config.data, config.model);
  if (const auto longest = architecture(config.model.type).longest) {
    TWOBP_CHECK(config.data.sequence <= longest(config.model), "data.sequence (", config.data.sequence,
                ") is longer than the model's ", longest(config.model),
                " positions: shorten it, or set model.positions for a new model.");
  }
  check_pipeline(config.pipeline);
  check_adapters(config);
  check_training(config);
}

namespace {

// "1.05x" -> 1.05; 0 if it is no such thing.
double parse_times(const std::string& text) {
  double times = 0;
  const char* end = text.data() + text.size();
  const auto [rest, status] = std::from_chars(text.data(), end, times, std::chars_format::fixed);
  const bool parsed =
      status == std::errc() && std::string_view(rest, end) == "x" && times >= 1 && times <= 1000;
  return parsed ? times : 0;
}

// "512MiB" -> bytes; -1 if it is no size.
int64_t parse_bytes(const std::string& text) {
  static const std::vector<std::pair<std::string, double>> units = {
      {"", 1},     {"B", 1},    {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40},
      {"kB", 1e3}, {"KB", 1e3}, {"MB", 1e6},     {"GB", 1e9},     {"TB", 1e12}};
  double number = 0;
  const char* end = text.data() + text.size();
  const auto [rest, status] = std::from_chars(text.data(), end, number, std::chars_format::fixed);
  size_t unit_at = static_cast<size_t>(rest - text.data());
  while (unit_at < text.size() && text[unit_at] == ' ') ++unit_at;
  const auto unit = std::find_if(units.begin(), units.end(), [&](const auto& candidate) {
    return text.compare(unit_at, std::string::npos, candidate.first) == 0;
  });
  const bool parsed = status == std::errc() && std::isfinite(number) && number >= 0 && unit != units.end();
  const double bytes = parsed ? std::floor(number * unit->second) : -1;
  // Less than a byte would round to 0, which may mean the opposite.
  if (!parsed || bytes >= 0x1p63 || (bytes == 0 && number > 0)) return -1;
  return static_cast<int64_t>(bytes);
}

}  // namespace

MemoryCap parse_memory_cap(const std::string& text) {
  if (text == "auto") return MemoryCap::automatic();
  if (const double times = parse_times(text); times > 0) return MemoryCap::automatic(times);
  const int64_t bytes = parse_bytes(text);
  TWOBP_CHECK(bytes >= 0, "pipeline.memory_cap is \"", text,
              "\": write \"auto\", a multiple of it from 1 to 1000 such as \"1.05x\", \"0\" for no cap, or a "
              "size such as \"512MiB\", \"2GiB\" or \"1000000\" (bytes).");
  return bytes;
}

int64_t parse_bucket(const std::string& text) {
  const int64_t bytes = parse_bytes(text);
  TWOBP_CHECK(bytes >= 1, "pipeline.bucket is \"", text,
              "\": write a size such as \"25MiB\" or \"1000000\" (bytes).");
  return bytes;
}

}  // namespace twobp
