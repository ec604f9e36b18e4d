#include <algorithm>
#include <array>
#include <filesystem>
#include <map>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/files/input_file.h"
#include "twobp/files/new_file.h"
#include "twobp/files/paths.h"
#include "twobp/files/safetensors.h"
#include "twobp/models/checked_json.h"
#include "twobp/models/hf_config.h"
#include "twobp/models/model_type.h"
#include "twobp/nn/layers/lora_linear.h"
#include "twobp/train/weights/weight_files.h"

namespace twobp {
namespace {

using nlohmann::json;

constexpr const char* kPeftPrefix = "base_model.model.";  // PEFT's wrapper around the model

using Tensors = std::map<std::string, at::Tensor>;  // by name

// The adapters; those of experts apart.
Tensors adapters_of(const std::vector<Parameter*>& weights) {
  Tensors adapters;
  for (const Parameter* weight : weights) {
    if (!is_adapter(weight->name())) continue;
    for (const auto& [name, part] : weight->parts_of(weight->master)) adapters[name] = part;
  }
  return adapters;
}

// Their names, with their shapes.
std::map<std::string, std::vector<int64_t>> adapters_of(const ModelSpec& model) {
  std::map<std::string, std::vector<int64_t>> adapters;
  for (const LayerSpec& spec : model.layers) {
    const auto layer = spec.make();  // allocates nothing
    for (const Parameter* parameter : parameters_of(*layer)) {
      if (!is_adapter(parameter->name())) continue;
      for (const ParameterPart& part : parameter->parts()) adapters[part.name] = {part.rows, parameter->sizes()[1]};
    }
  }
  return adapters;
}

constexpr const char* kA = ".lora_A.weight";
constexpr const char* kB = ".lora_B.weight";

// An adapter of all experts of a layer, which PEFT has for a parameter of a module (LoraConfig.target_parameters). It
// stores A as (experts * rank, in) and B as (out, rank * experts), where the expert's number grows fastest.
struct StackAdapter {
  const ExpertStack* stack;
  std::string file;  // before .lora_A.weight. If a module has two, the first is in that of the second, its base_layer

  size_t experts() const { return stack->parts.size() / stack->projections; }
  std::string part(size_t expert, const char* kind) const { return concat(stack->module, ".", expert, kind); }
};

// Those among the named adapters.
template <typename Named>
std::vector<StackAdapter> stacks_of(const Named& adapters, const TensorNames& naming) {
  std::map<std::string, std::vector<const ExpertStack*>> by_module;  // in the order of the module's parameters
  for (const auto& [name, stack] : naming.stacks) {
    if (stack.module.empty() || !adapters.contains(concat(stack.module, ".0", kA))) continue;
    auto& of_module = by_module[stack.module.substr(0, stack.module.rfind('.'))];
    of_module.insert(stack.projections > 1 ? of_module.begin() : of_module.end(), &stack);
  }
  std::vector<StackAdapter> all;
  for (const auto& [module, stacks] : by_module) {
    if (stacks.size() == 2) all.push_back({stacks.front(), module + ".base_layer"});
    all.push_back({stacks.back(), module});
  }
  return all;
}

// The outputs of an expert's projections, which take turns in some stacks, one after the other, or `back`.
at::Tensor reordered(const at::Tensor& b, const ExpertStack& stack, bool back) {
  if (!stack.interleaved) return b;
  const auto count = static_cast<int64_t>(stack.projections);
  const at::Tensor apart = back ? b.unflatten(0, {count, -1}) : b.unflatten(0, {-1, count});
  return apart.transpose(0, 1).flatten(0, 1);
}

// The adapters of experts become those of stacks.
void join_experts(Tensors& adapters, const TensorNames& naming) {
  const auto take = [&](const std::string& name) { return std::move(adapters.extract(name).mapped()); };
  for (const StackAdapter& one : stacks_of(adapters, naming)) {
    std::vector<at::Tensor> a, b;
    for (size_t expert = 0; expert < one.experts(); ++expert) {
      a.push_back(take(one.part(expert, kA)));
      b.push_back(reordered(take(one.part(expert, kB)), *one.stack, /*back=*/true));
    }
    adapters[one.file + kA] = at::cat(a);
    adapters[one.file + kB] = at::stack(b, 2).flatten(1);
  }
}

// The way back. Throws Error for a shape that does not fit the number of experts.
void split_experts(Tensors& adapters, const std::vector<StackAdapter>& stacks, const std::string& folder) {
  const std::string prefix = kPeftPrefix;
  for (const StackAdapter& one : stacks) {
    const auto count = static_cast<int64_t>(one.experts());
    for (const char* kind : {kA, kB}) {
      const bool is_a = kind == std::string_view(kA);
      const std::string name = adapters.contains(prefix + one.file + kind) ? prefix + one.file + kind : one.file + kind;
      if (!adapters.contains(name)) continue;
      const at::Tensor whole = std::move(adapters.extract(name).mapped());
      TWOBP_CHECK(whole.dim() == 2 && whole.size(is_a ? 0 : 1) % count == 0, folder, ": ", name, " is ", whole.sizes(),
                  ", which is not of ", count, " experts");
      for (int64_t expert = 0; expert < count; ++expert) {
        adapters[one.part(expert, kind)] =
            is_a ? whole.unflatten(0, {count, -1}).select(0, expert)
                 : reordered(whole.unflatten(1, {-1, count}).select(2, expert), *one.stack, /*back=*/false);
      }
    }
  }
}

bool matches(const std::string& module, const std::string& target) {
  return ("." + module).ends_with("." + target);
}

// How PEFT's from_pretrained finds the model's class: by a task, or by a name where no task has that class.
json auto_mapping(const ModelType& type) {
  if (!type.peft_task.empty()) return nullptr;
  return {{"base_model_class", type.hf_class},
          {"parent_library", concat("transformers.models.", type.hf_type, ".modeling_", type.hf_type)}};
}

// Writes PEFT's two files.
void write_adapter(const std::string& directory, const ModelConfig& model, Tensors adapters, at::ScalarType dtype) {
  const ModelType& type = model.type.type();
  json modules = json::array(), parameters = json::array();
  const TensorNames naming = type.names(model.type);
  const std::vector<StackAdapter> stacks = stacks_of(adapters, naming);
  for (const std::string& target : model.lora_targets) {
    const bool of_experts =
        std::any_of(stacks.begin(), stacks.end(), [&](const auto& one) { return matches(one.stack->module, target); });
    (of_experts ? parameters : modules).push_back(target);
  }
  join_experts(adapters, naming);
  NamedTensors tensors;
  for (const auto& [name, tensor] : adapters) tensors.emplace_back(kPeftPrefix + name, tensor);
  TWOBP_CHECK(!tensors.empty(), "save.lora is \"adapter\", but the model has no adapters: set model.lora");
  check_adapter_folder(directory);
  check_trained(tensors);
  NewFolder made(directory);
  const json description = {{"peft_type", "LORA"},
                            {"task_type", type.peft_task.empty() ? json() : json(type.peft_task)},
                            {"auto_mapping", auto_mapping(type)},
                            {"base_model_name_or_path", model.from},
                            {"r", model.lora},
                            {"lora_alpha", model.lora_alpha},
                            {"lora_dropout", 0.0},
                            {"target_modules", modules},
                            {"target_parameters", parameters.empty() ? json() : parameters},
                            {"bias", "none"},
                            {"fan_in_fan_out", type.transposed},
                            {"inference_mode", true}};
  const std::filesystem::path folder(directory);
  NewFile weights(folder / "adapter_model.safetensors");
  write_safetensors(weights, tensors, {{"format", "pt"}}, {dtype});
  weights.finish();
  NewFile file(folder / kAdapterConfig);
  file.write(description.dump(2) + "\n");
  file.finish();
  weights.commit();
  file.commit();
  made.keep();
}

// Keys of adapter_config.json that may have any value. They do not change what the adapter computes, or they
// are compared on their own.
constexpr std::array<const char*, 17> kAnyValue = {"peft_type",         "r",
                                                   "lora_alpha",        "lora_dropout",
                                                   "target_modules",    "bias",
                                                   "init_lora_weights", "task_type",
                                                   "auto_mapping",      "base_model_name_or_path",
                                                   "revision",          "peft_version",
                                                   "inference_mode",    "runtime_config",
                                                   "eva_config",        "megatron_core",
                                                   "qalora_group_size"};

// How adapters start without a change of the model. With others, such as "pissa", PEFT subtracts the first
// adapter from the model's weights when it loads the adapter.
constexpr std::array<const char*, 3> kStarts = {"gaussian", "eva", "orthogonal"};

bool is_unset(const json& value) {
  return value.is_string() ? value == json("") : value.empty() || value == json(false);
}

constexpr const char* kMerge =
    "but only plain LoRA adapters are supported: merge this one into its model with PEFT (merge_and_unload), "
    "and start from that";

// Throws Error unless the description is that of a plain LoRA adapter of a model of this type.
void check_plain(const json& config, const ModelType& type, bool has_stacks, const std::string& path) {
  const auto refuse = [&](const std::string& key, const json& value) {
    fail(path, ": ", key, " is ", shown(value), ", ", kMerge);
  };
  for (const auto& [key, value] : config.items()) {
    const bool any = std::find(kAnyValue.begin(), kAnyValue.end(), key) != kAnyValue.end() ||
                     (key == "fan_in_fan_out" && type.transposed) || (key == "target_parameters" && has_stacks);
    if (!any && !is_unset(value)) refuse(key, value);
  }
  const json bias = config.value("bias", json("none"));
  if (bias != json("none")) refuse("bias", bias);
  const json start = config.value("init_lora_weights", json(true));
  const bool known = start.is_null() || start.is_boolean() ||
                     std::any_of(kStarts.begin(), kStarts.end(), [&](const char* one) { return start == json(one); });
  if (!known) refuse("init_lora_weights", start);
  const json dropout = config.value("lora_dropout", json(0));
  TWOBP_CHECK(dropout == json(0), path, ": lora_dropout is ", shown(dropout),
              ", but adapters are trained without dropout here: set it to 0");
}

// Whether PEFT uses this tensor of an adapter. A text is a regular expression or "all-linear": there, the
// tensors show which modules are meant.
bool is_target(const std::string& name, const json& targets) {
  if (!targets.is_array()) return true;
  const std::string module = name.substr(0, name.rfind(".lora_"));
  return std::any_of(targets.begin(), targets.end(), [&](const json& target) {
    return target.is_string() && matches(module, target.get<std::string>());
  });
}

// Throws Error for a stack that PEFT would not adapt.
void check_parameters(const std::vector<StackAdapter>& stacks, const json& config, const std::string& path) {
  const json targets = config.value("target_parameters", json());
  for (const StackAdapter& one : stacks) {
    const bool known = targets.is_array() && is_target(one.stack->module + kA, targets);
    TWOBP_CHECK(known, path, ": target_parameters is ", targets.dump(), ", but model.lora_targets has ",
                one.stack->module, ": set model.lora_targets to target_modules and target_parameters");
  }
}

}  // namespace

void check_adapter_folder(const std::string& directory) {
  std::error_code missing;
  TWOBP_CHECK(!std::filesystem::exists(std::filesystem::path(directory) / kModelConfig, missing), directory,
              ": holds a model (", kModelConfig,
              "), to which transformers would add the adapter: set save.model to another folder");
}

at::ScalarType parse_saved_dtype(const std::string& name) {
  if (name == "bfloat16") return at::kBFloat16;
  if (name == "float16") return at::kHalf;
  TWOBP_CHECK(name == "float32", "unknown dtype of saved weights \"", name, "\"");
  return at::kFloat;
}

void check_trained(const NamedTensors& weights) {
  for (const auto& [name, tensor] : weights) {
    TWOBP_CHECK(only_finite(tensor), "the trained weight ", name,
                " has a value that is not finite, so nothing is saved: lower optimizer.lr, or set "
                "train.clip_norm");
  }
}

namespace {

// A projection of an expert changes by b a.
struct LowRank {
  at::Tensor a, b;  // float32
};

// By the weight's name, of the experts that are here.
std::map<std::string, LowRank> adapters_of_experts(const Tensors& adapters, const TensorNames& naming) {
  std::map<std::string, LowRank> all;
  for (const auto& [name, stack] : naming.stacks) {
    for (size_t i = 0; !stack.module.empty() && i < stack.parts.size(); ++i) {
      const std::string expert = concat(stack.module, ".", i / stack.projections);
      const auto a = adapters.find(expert + kA), b = adapters.find(expert + kB);
      if (a == adapters.end() || b == adapters.end()) continue;
      const at::Tensor of_projection = b->second.chunk(static_cast<int64_t>(stack.projections))[i % stack.projections];
      all[stack.parts[i]] = {a->second.to(at::kFloat), of_projection.to(at::kFloat)};
    }
  }
  return all;
}

}  // namespace

NamedTensors merged_weights(const std::vector<Parameter*>& weights, const ModelConfig& model) {
  const Tensors adapters = adapters_of(weights);
  const double scale = model.lora > 0 ? model.lora_alpha / static_cast<double>(model.lora) : 0;
  std::map<std::string, LowRank> of_experts;
  if (!adapters.empty()) of_experts = adapters_of_experts(adapters, model.type.type().names(model.type));
  NamedTensors merged;
  for (const Parameter* weight : weights) {
    if (is_adapter(weight->name())) continue;
    for (auto& [name, tensor] : weight->parts_of(weight->master)) {
      const std::string module = module_of(name);
      if (const auto adapter = of_experts.find(name); adapter != of_experts.end()) {
        tensor = tensor.to(at::kFloat).addmm(adapter->second.b, adapter->second.a, 1, scale);
      }
      const auto a = adapters.find(module + kA);
      const auto b = adapters.find(module + kB);
      if (a != adapters.end() && b != adapters.end()) {
        const at::Tensor sum = (weight->transposed() ? tensor.t() : tensor).to(at::kFloat);
        tensor = sum.addmm(b->second.to(at::kFloat), a->second.to(at::kFloat), 1, scale);
        if (weight->transposed()) tensor = tensor.t().contiguous();
      }
      merged.emplace_back(name, tensor);
    }
  }
  return merged;
}

void save_adapter(const std::string& directory, const ModelConfig& model, const std::vector<Parameter*>& weights,
                  const std::string& dtype, const Processes& processes) {
  json names = json::array();
  Values values;
  for (const auto& [name, adapter] : adapters_of(weights)) {
    names.push_back(name);
    values.push_back(adapter);
  }
  const std::vector<std::string> all_names = processes.to_first(names.dump());
  const std::vector<Values> all_values = processes.tensors_to_first(values);
  processes.together([&] {
    Tensors tensors;
    for (size_t process = 0; process < all_names.size(); ++process) {
      const json names_there = json::parse(all_names[process]);
      for (size_t i = 0; i < names_there.size(); ++i) {
        tensors.emplace(names_there[i].get<std::string>(), all_values[process].at(i));
      }
    }
    if (processes.is_first()) write_adapter(directory, model, std::move(tensors), parse_saved_dtype(dtype));
  });
}

void load_adapter(const std::string& directory, const ModelConfig& model, const ModelSpec& spec,
                  const std::vector<Parameter*>& weights) {
  const std::filesystem::path folder(directory);
  const std::string config_path = (folder / kAdapterConfig).string();
  std::error_code missing;
  TWOBP_CHECK(std::filesystem::exists(config_path, missing), config_path, hub_hint(directory),
              ": no such file: give the folder of a LoRA adapter");
  const json config = read_json_object(config_path, /*max_depth=*/8);
  TWOBP_CHECK(config.value("peft_type", json("")) == json("LORA"), config_path,
              ": not the description of a LoRA adapter");
  const json rank = config.value("r", json());
  TWOBP_CHECK(rank.is_number_integer() && rank.get<int64_t>() == model.lora, config_path, ": the adapter's rank is ",
              rank.dump(), ", but model.lora is ", model.lora, ": set it to the adapter's");
  const json alpha = config.value("lora_alpha", json());
  TWOBP_CHECK(alpha.is_number() && alpha.get<double>() == model.lora_alpha, config_path,
              ": the adapter's lora_alpha is ", alpha.dump(), ", but model.lora_alpha is ", model.lora_alpha,
              ": set it to the adapter's");
  const Tensors here = adapters_of(weights);
  auto adapters = adapters_of(spec);
  const TensorNames naming = model.type.type().names(model.type);
  const std::vector<StackAdapter> stacks = stacks_of(adapters, naming);
  check_plain(config, model.type.type(), !stacks.empty(), config_path);
  check_parameters(stacks, config, config_path);
  const SafetensorsFile file((folder / "adapter_model.safetensors").string());
  Tensors tensors;
  for (const std::string& name : file.names()) tensors[name] = file.tensor(name);
  split_experts(tensors, stacks, folder.string());
  const auto of_stack = [&](const std::string& name) {
    return std::any_of(stacks.begin(), stacks.end(),
                       [&](const auto& one) { return name.starts_with(one.stack->module + "."); });
  };
  for (const auto& [name, tensor] : tensors) {
    // PEFT also saves whole weights, of output layers with an adapter for example.
    TWOBP_CHECK(is_adapter(name), folder.string(), ": has the tensor ", name.substr(0, 200), ", ", kMerge);
    const bool prefixed = name.starts_with(kPeftPrefix);
    const auto adapter = adapters.find(prefixed ? name.substr(std::string(kPeftPrefix).size()) : name);
    TWOBP_CHECK(adapter != adapters.end(), folder.string(), ": the adapter has ", name,
                ", which is no adapter of this model: set model.lora_targets to its target_modules, ",
                config.value("target_modules", json()).dump());
    const json targets = config.value("target_modules", json());
    TWOBP_CHECK(of_stack(name) || is_target(name, targets), folder.string(), ": has the tensor ", name,
                ", but target_modules of ", kAdapterConfig, " is ", targets.dump(),
                ", so PEFT does not use it: add the module there, or remove its tensors");
    TWOBP_CHECK(tensor.sizes() == at::IntArrayRef(adapter->second), folder.string(), ": ", name, " is ", tensor.sizes(),
                ", expected ", at::IntArrayRef(adapter->second));
    TWOBP_CHECK(tensor.is_floating_point(), folder.string(), ": ", name, " is of type ",
                c10::toString(tensor.scalar_type()), ", not of floating point numbers");
    TWOBP_CHECK(only_finite(tensor), folder.string(), ": ", name,
                " has a value that is not finite (NaN or infinity): the adapter is damaged");
    if (const auto local = here.find(adapter->first); local != here.end()) local->second.copy_(tensor);
    adapters.erase(adapter);
  }
  for (Parameter* weight : weights) {
    if (is_adapter(weight->name())) weight->refresh_value();
  }
  TWOBP_CHECK(adapters.empty(), folder.string(), ": the adapter has no ",
              adapters.empty() ? "" : adapters.begin()->first, ": set model.lora_targets to its target_modules, ",
              config.value("target_modules", json()).dump());
}

}  // namespace twobp
