#include "twobp/train/config.h"

#include <filesystem>
#include <optional>
#include <system_error>

#include "twobp/config/settings.h"
#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/models/captured.h"
#include "twobp/models/hf_config.h"
#include "twobp/train/check_config.h"

namespace twobp {
namespace {

constexpr uint64_t kMaxFileBytes = 16 << 20;

const Section& train_section() {
  static const Section section = make_section<TrainConfig>(
      "train",
      {TWOBP_KEY(TrainConfig, steps, "optimizer steps of the run").in("steps").from(1, kMaxSteps).noted_on_resume(),
       TWOBP_KEY(TrainConfig, seed, "seed of the initial weights, the sample order and synthetic data"),
       TWOBP_KEY(TrainConfig, clip_norm, "largest global gradient norm; 0: no clipping").at_least(0).noted_on_resume(),
       TWOBP_KEY(TrainConfig, eval_every, "steps between evaluations; 0: only at the end, if there is held-out data")
           .in("steps")
           .from(0, kMaxSteps)
           .free_on_resume(),
       TWOBP_KEY(TrainConfig, eval_batches,
                 "largest number of batches that an evaluation reads; 0: all held-out batches")
           .in("batches")
           .from(0, kMaxSteps)
           .free_on_resume(),
       TWOBP_KEY(TrainConfig, log_every, "steps between progress lines if the output is not a terminal")
           .in("steps")
           .from(1, kMaxSteps)
           .free_on_resume()
           .differs_by_process(),
       TWOBP_KEY(TrainConfig, precision,
                 "precision of the computation; gradients, weights and optimizer state stay fp32")
           .one_of({"fp32", "bf16", "fp16"}),
       TWOBP_KEY(TrainConfig, loss_scale, "fp16: initial loss scale; halved when a step overflows")
           .at_least(1)
           .free_on_resume()});
  return section;
}

const Section& save_section() {
  static const Section section = make_section<SaveConfig>(
      "save",
      {TWOBP_KEY(SaveConfig, model,
                 "folder for the trained model after the last step, also if Ctrl-C ends the run; "
                 "empty: none")
           .path(),
       TWOBP_KEY(SaveConfig, dtype, "dtype of the saved weights")
           .one_of({"float32", "bfloat16", "float16"})
           .free_on_resume(),
       TWOBP_KEY(SaveConfig, lora, "LoRA adapter: merged into the weights, or saved alone in PEFT's files")
           .one_of({"merged", "adapter"})
           .free_on_resume(),
       TWOBP_KEY(SaveConfig, checkpoints, "folder for checkpoints; empty: none").path(),
       TWOBP_KEY(SaveConfig, every, "steps between checkpoints").in("steps").from(1, kMaxSteps).free_on_resume(),
       TWOBP_KEY(SaveConfig, keep, "number of checkpoints to keep, the newest ones")
           .in("checkpoints")
           .from(1, kMaxSteps)
           .free_on_resume()});
  return section;
}

std::vector<SectionValues> sections_of(Config& config) {
  return {{&model_section(), &config.model},       {&data_section(), &config.data},
          {&pipeline_section(), &config.pipeline}, {&optimizer_section(), &config.optimizer},
          {&train_section(), &config.train},       {&save_section(), &config.save}};
}

// Throws Error for given keys that contradict the options of the model in model.from.
void check_against_weights(const Settings& settings, ModelOptions& given, ModelOptions& file, const std::string& from) {
  const SectionValues ours = given.chosen();
  const SectionValues theirs = file.chosen();
  for (const Key& key : ours.section->keys) {
    if (!settings.has("model", key.name) || !comes_with_weights(given.type(), key.name)) continue;
    // Equal values are allowed, so that a fully printed configuration can be read again.
    const std::string one = value_to_json(key, ours.values);
    const std::string other = value_to_json(key, theirs.values);
    TWOBP_CHECK(one == other, "model.", key.name, " is ", one, ", but the model in model.from has ", other,
                ": the architecture comes from ", from, "/config.json, so remove model.", key.name);
  }
}

// The fields of micro-batches of a captured model that the settings ask for.
CaptureFields asked_fields(const Config& config) {
  const DataConfig& data = config.data;
  const int64_t micro_batch = config.pipeline.micro_batch_size;
  return data.arrays.empty() ? fields_of_tokens(micro_batch, data.sequence)
                             : fields_of_arrays(data.arrays, micro_batch);
}

Config of_captured(const Settings& settings) {
  Config config;
  config.model.type = ModelOptions("captured");
  settings.assign(sections_of(config));
  check_values({{&data_section(), &config.data}, {&pipeline_section(), &config.pipeline}});
  return config;
}

// Captures the model in model.from for these micro-batches.
ModelOptions captured_for(const Settings& settings, const std::string& from) {
  const Config config = of_captured(settings);
  const DataConfig& data = config.data;
  TWOBP_CHECK(!data.arrays.empty() || !data.text.empty() || !data.tokens.empty() || data.synthetic == "tokens",
              "model.from is ", from,
              ", a model that is captured for the fields of the data: set data.text, "
              "data.tokens, or data.arrays (a folder with NAME.npy for each field)");
  return capture_model(from, asked_fields(config), data.arrays, config.train.precision, data.cache);
}

// The options in model.from's config.json. None for a new model.
std::optional<ModelOptions> options_of_weights(const Settings& settings, const std::string& from, bool with_data) {
  if (from.empty()) return std::nullopt;
  const bool captured = needs_capture(from);
  TWOBP_CHECK(!captured || with_data, from,
              ": holds a model that must be captured: load it with transformers, and give the module to the "
              "trainer");
  ModelOptions file = captured ? captured_for(settings, from) : read_hf_config(from);
  if (with_data && serves_many(file)) take_fields(file, asked_fields(of_captured(settings)));
  const std::string type = settings.text("model", "type").value_or(file.name());
  TWOBP_CHECK(type == file.name(), "model.type is \"", type, "\", but the model in model.from has \"", file.name(),
              "\": the architecture comes from ", from, "/config.json, so remove model.type");
  return file;
}

// Errors of single keys name their origin themselves.
template <typename Body>
void with_origin(const std::string& origin, const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    if (origin.empty()) throw;
    fail(origin, ": ", error.what());
  }
}

// Fills in the sections of `config` that sections_of(config) names. `model` takes the place of model.type.
template <typename Sections, typename Check>
Config filled_in(const Settings& settings, Config config, const std::string& origin, const ModelOptions* model,
                 bool with_data, const Sections& sections_of, const Check& check) {
  const std::string from = settings.text("model", "from").value_or("");
  std::optional<ModelOptions> file;
  with_origin(origin, [&] { file = options_of_weights(settings, from, with_data); });
  if (file) config.model.type = *file;
  if (model != nullptr) config.model.type = *model;
  settings.assign(sections_of(config));
  with_origin(origin, [&] {
    if (file) check_against_weights(settings, config.model.type, *file, from);
    check(config);
  });
  return config;
}

Config finish(Settings settings, const std::vector<std::string>& overrides, const std::string& origin) {
  for (const auto& text : overrides) settings.set(text);
  return filled_in(settings, {}, origin, nullptr, /*with_data=*/true, sections_of, check_config);
}

std::string read_config(const std::string& path) {
  std::error_code status;
  TWOBP_CHECK(!std::filesystem::is_directory(path, status), path, ": is a folder: give the configuration file itself.");
  return read_text(path, kMaxFileBytes);
}

}  // namespace

Config load_config(const std::string& path, const std::vector<std::string>& overrides) {
  Config config = path.empty() ? finish({}, overrides, "") : parse_config(read_config(path), path, overrides);
  // The configuration in an older program's checkpoint may have such keys. So parse_config allows them.
  with_origin(path, [&] { check_used_keys(config.data, config.model.input()); });
  return config;
}

Config parse_config(const std::string& json, const std::string& origin, const std::vector<std::string>& overrides) {
  Settings settings;
  settings.read_json(json, origin);
  return finish(std::move(settings), overrides, origin);
}

Config parse_config_without_data(const std::string& json, const std::string& origin, const ModelOptions* model) {
  Settings settings;
  settings.read_json(json, origin);
  Config config;
  config.data.held_out = 0;
  config.pipeline.run_ahead = "off";
  const auto sections = [&](Config& of) {
    std::vector<SectionValues> all = {
        {&pipeline_section(), &of.pipeline}, {&optimizer_section(), &of.optimizer}, {&train_section(), &of.train}};
    if (model == nullptr) all.insert(all.begin(), {&model_section(), &of.model});
    return all;
  };
  return filled_in(settings, std::move(config), origin, model, /*with_data=*/false, sections, [&](Config& of) {
    check_values(sections(of));
    check_contradictions_without_data(of);
  });
}

std::string config_to_json(const Config& config) {
  Config copy = config;  // sections return pointers for writing
  return settings_to_json(sections_of(copy));
}

std::string config_reference() {
  Config defaults;
  return settings_reference(sections_of(defaults));
}

void for_each_key(const Config& config,
                  const std::function<void(const std::string& name, const Key& key, void* values)>& visit) {
  Config copy = config;
  for_each_key(sections_of(copy), [&](const std::string& section, const Key& key, const SectionValues& of) {
    visit(section + "." + key.name, key, of.values);
  });
}

void check_config(const Config& config) {
  Config copy = config;
  check_values(sections_of(copy));
  check_contradictions(config);
}

}  // namespace twobp
