#include <algorithm>

#include <nlohmann/json.hpp>

#include "twobp/config/settings.h"
#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/models/model_type.h"
#include "twobp/nn/kernels/products/products.h"
#include "twobp/nn/kernels/rows/operators.h"
#include "twobp/train/build_model.h"
#include "twobp/train/checkpoint/checkpoint.h"
#include "twobp/train/checkpoint/checkpoint_format.h"

namespace twobp {
namespace {

using nlohmann::json;

// Linear and cosine schedules end at train.steps, so it changes their course.
OnResume rule_of(const std::string& name, const Key& key, bool constant_lr) {
  return name == "train.steps" && constant_lr ? OnResume::kFree : key.on_resume;
}

// The value of a key, or its default if the checkpoint's program did not have the key.
json value_of(const json& config, const std::string& full_name, const json& defaults) {
  const json::json_pointer place("/" + join(split(full_name, '.'), "/"));
  return config.contains(place) ? config[place] : defaults.value(place, json());
}

uint64_t pipeline_value(const json& config, const char* key, const json& defaults) {
  const bool there = config.contains("pipeline") && config["pipeline"].contains(key);
  const json value = (there ? config : defaults)["pipeline"][key];
  return value.is_number_integer() ? value.get<uint64_t>() : 0;
}

// The micro-batches of all replicas together: a step learns from these, and the data position counts them.
json all_micro_batches(const json& config, const json& defaults) {
  return pipeline_value(config, "data_parallel", defaults) * pipeline_value(config, "micro_batches", defaults);
}

// Replaces defaults that stand for a value of other keys, so that writing them explicitly makes no difference.
Config filled_in(Config config) {
  config.model.type.type().fill_in(config.model.type);
  if (config.pipeline.micro_batches == 0) config.pipeline.micro_batches = pipeline_shape(config.pipeline).micro_batches;
  return config;
}

// A checkpoint of an older program may have other values of these.
std::vector<std::string> unused_data_keys(const json& config, ModelInput model) {
  Settings settings;
  settings.read_json(json{{"data", config.at("data")}}.dump(), "");
  DataConfig data;
  settings.assign({{&data_section(), &data}});
  model.from = config.at("model").at("from").get<std::string>();
  std::vector<std::string> names = unused_keys(data, model);
  for (std::string& name : names) name.insert(0, "data.");
  return names;
}

std::string data_fingerprint(const Dataset& train) {
  constexpr int64_t kSamples = 16;
  uint32_t crc = 0;
  for (int64_t i = 0; i < std::min(kSamples, train.size()); ++i) {
    const int64_t sample = train.size() <= kSamples ? i : i * (train.size() - 1) / (kSamples - 1);
    for (const auto& [name, tensor] : train.read({sample}, 0)) {
      const at::Tensor values = tensor.contiguous();
      crc = crc32_of(name.data(), name.size(), crc);
      crc = crc32_of(values.const_data_ptr(), values.nbytes(), crc);
    }
  }
  return concat(train.size(), " samples, checksum ", crc);
}

// If a schedule sums gradients in another order, the bits depend on every cell of the schedule and on where the p2
// policy puts W.
std::string order_of(const Variant& variant) {
  if (!reorders(variant)) return "";
  uint32_t crc = 0;
  for (const auto& list : variant.schedule.written()->ranks) {
    for (const Instruction& instruction : list) {
      const std::string cell = to_string(instruction);
      crc = crc32_of(cell.data(), cell.size() + 1, crc);
    }
  }
  return concat("cells ", crc, ", p2 ", policy_name(variant.policy));
}

}  // namespace

RunFacts facts_of_run(const Config& config, const Dataset& train, const Variant& variant) {
  std::string kernels = kernels_in_use(config.pipeline.device);
  if (config.pipeline.device == "cpu") {
    kernels += concat(" with ", c10::toString(product_type(compute_dtype(config.train.precision))), " products");
  }
  return {config_to_json(filled_in(config)), data_fingerprint(train), std::move(kernels), order_of(variant)};
}

std::vector<std::string> check_same_run(const RunFacts& saved, const RunFacts& now) {
  const json before = json::parse(saved.config);
  const json after = json::parse(now.config);
  Config usual;  // has the same model type, so that its keys exist
  usual.model.type = ModelOptions(after["model"]["type"].get<std::string>());
  const json defaults = json::parse(config_to_json(usual));
  const bool constant_lr = after["optimizer"]["schedule"] == "constant";
  const bool replicas =
      pipeline_value(before, "data_parallel", defaults) != 1 || pipeline_value(after, "data_parallel", defaults) != 1;
  const std::vector<std::string> unused = unused_data_keys(after, usual.model.input());
  std::vector<std::string> differences;
  std::vector<std::string> notes;
  std::vector<std::string> sources;  // keys of the data
  for_each_key(usual, [&](const std::string& name, const Key& key, void*) {
    const bool batches = name == "pipeline.micro_batches";
    const json old_value = batches ? all_micro_batches(before, defaults) : value_of(before, name, defaults);
    const json new_value = batches ? all_micro_batches(after, defaults) : value_of(after, name, defaults);
    if (old_value == new_value || std::find(unused.begin(), unused.end(), name) != unused.end()) return;
    const std::string text = concat(name, batches && replicas ? " x pipeline.data_parallel is " : " is ",
                                    new_value.dump(), " but ", old_value.dump(), " in the checkpoint");
    switch (rule_of(name, key, constant_lr)) {
      case OnResume::kSame:
        differences.push_back(text);
        break;
      case OnResume::kNoted:
        notes.push_back(text + ": from here on, results differ from those of the stopped run");
        break;
      case OnResume::kFree:
        if (name.starts_with("data.")) sources.push_back(text);
        break;
    }
  });
  if (differences.empty() && saved.data != now.data) {
    differences = sources;
    differences.push_back(concat("the training data is ", now.data, " but ", saved.data, " in the checkpoint"));
  }
  TWOBP_CHECK(differences.empty(), "cannot resume: ", join(differences, "; "),
              ": use the same settings, or another folder for save.checkpoints");
  if (saved.kernels != now.kernels) {
    notes.push_back(concat("the kernels here are ", now.kernels, ", but those of the checkpoint were ", saved.kernels,
                           ": the run continues, but not to the bit"));
  }
  if (saved.order != now.order) {
    notes.push_back(concat("gradients were summed in the order of ",
                           saved.order.empty() ? "micro-batches" : saved.order, ", but are now summed in that of ",
                           now.order.empty() ? "micro-batches" : now.order,
                           " (a schedule file may give up the order of micro-batches): the run continues, "
                           "but not to the bit"));
  }
  return notes;
}

}  // namespace twobp
