// `twobp checkpoint`: inspects, verifies and converts checkpoints.
#include "twobp/train/checkpoint/checkpoint.h"

#include <cstdio>
#include <filesystem>
#include <memory>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "apps/commands.h"
#include "apps/print.h"
#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/train/checkpoint/checkpoint_folder.h"

namespace twobp {
namespace {

using nlohmann::json;
using File = CheckpointFile;

struct CheckpointOptions {
  std::string folder;
  bool tensors = false;
  std::string json;
  std::string model;
  std::string dtype = "float32";
  std::vector<std::string> overrides;
};

constexpr File kFiles[] = {File::kWeights, File::kOptimizer, File::kFrozen};

struct Count {
  int64_t tensors = 0;
  int64_t numbers = 0;
};

std::map<std::string, Count> count_by_file(const Checkpoint& checkpoint) {
  std::map<std::string, Count> counts;
  for (const auto& [name, facts] : checkpoint.files()) counts[name] = {};
  for (const File file : kFiles) {
    for (const std::string& name : checkpoint.names(file)) {
      Count& count = counts[checkpoint.file_with(file, name)];
      ++count.tensors;
      count.numbers += checkpoint.read(file, name).numel();
    }
  }
  return counts;
}

// Returns the keys that are not at their defaults, such as "model.dim=64".
std::vector<std::string> settings_of(const json& config) {
  const json defaults = json::parse(config_to_json(Config{}));
  std::vector<std::string> settings;
  for (const auto& [section, keys] : config.items()) {
    if (!keys.is_object()) continue;
    for (const auto& [key, value] : keys.items()) {
      const bool known = defaults.contains(section) && defaults[section].contains(key);
      if (known && defaults[section][key] == value) continue;
      settings.push_back(concat(section, '.', key, '=', value.is_string() ? value.get<std::string>() : value.dump()));
    }
  }
  return settings;
}

std::string dtype_of(const at::Tensor& tensor) {
  return c10::toString(tensor.scalar_type());
}

json to_json(const Checkpoint& checkpoint) {
  const CheckpointState& state = checkpoint.state();
  json report = {{"folder", checkpoint.folder().string()},
                 {"format", checkpoint.format()},
                 {"step", state.position.step},
                 {"batches", state.position.batches},
                 {"optimizer_steps", state.optimizer_steps},
                 {"gradient_scale", state.position.loss_scale},
                 {"processes", checkpoint.processes()},
                 {"data", state.run.data},
                 {"kernels", state.run.kernels},
                 {"order", state.run.order},
                 {"config", json::parse(state.run.config)},
                 {"files", json::object()},
                 {"tensors", json::array()}};
  const auto counts = count_by_file(checkpoint);
  for (const auto& [name, facts] : checkpoint.files()) {
    report["files"][name] = {{"bytes", facts.bytes},
                             {"crc32", facts.crc},
                             {"tensors", counts.at(name).tensors},
                             {"numbers", counts.at(name).numbers}};
  }
  for (const File file : kFiles) {
    for (const std::string& name : checkpoint.names(file)) {
      const at::Tensor tensor = checkpoint.read(file, name);
      report["tensors"].push_back({{"name", name},
                                   {"file", checkpoint.file_with(file, name)},
                                   {"dtype", dtype_of(tensor)},
                                   {"shape", tensor.sizes().vec()}});
    }
  }
  return report;
}

void print_files(const Checkpoint& checkpoint) {
  std::vector<std::vector<std::string>> rows = {{"file", "tensors", "numbers", "size", "CRC-32"}};
  const auto counts = count_by_file(checkpoint);
  Count all;
  uint64_t bytes = 0;
  for (const auto& [name, facts] : checkpoint.files()) {
    const Count& count = counts.at(name);
    char crc[16];
    std::snprintf(crc, sizeof(crc), "%08x", facts.crc);
    rows.push_back({name, std::to_string(count.tensors), std::to_string(count.numbers),
                    format_bytes(static_cast<double>(facts.bytes)), crc});
    all.tensors += count.tensors;
    all.numbers += count.numbers;
    bytes += facts.bytes;
  }
  rows.push_back(
      {"all", std::to_string(all.tensors), std::to_string(all.numbers), format_bytes(static_cast<double>(bytes)), ""});
  print_table(rows);
}

void print_tensors(const Checkpoint& checkpoint) {
  std::vector<std::vector<std::string>> rows = {{"tensor", "dtype", "shape", "file"}};
  for (const File file : kFiles) {
    for (const std::string& name : checkpoint.names(file)) {
      const at::Tensor tensor = checkpoint.read(file, name);
      rows.push_back({name, dtype_of(tensor), concat(tensor.sizes()), checkpoint.file_with(file, name)});
    }
  }
  print_table(rows);
}

void inspect(const CheckpointOptions& options) {
  const Checkpoint checkpoint(find_checkpoint(options.folder), Checkpoint::Verify::kWhatIsRead);
  const CheckpointState& state = checkpoint.state();
  print("%s: step %lld, %lld updates, %lld batches of %s\n", checkpoint.folder().c_str(),
        static_cast<long long>(state.position.step), static_cast<long long>(state.optimizer_steps),
        static_cast<long long>(state.position.batches), state.run.data.c_str());
  print("format %d, written by %d %s, kernels %s\n", checkpoint.format(), checkpoint.processes(),
        checkpoint.processes() == 1 ? "process" : "processes", state.run.kernels.c_str());
  print("%s\n\n", join(settings_of(json::parse(state.run.config)), " ").c_str());
  print_files(checkpoint);
  if (options.tensors) {
    print("\n");
    print_tensors(checkpoint);
  }
  if (!options.json.empty()) write_text(options.json, to_json(checkpoint).dump(2) + "\n");
}

int verify(const CheckpointOptions& options) {
  const std::filesystem::path folder = find_checkpoint(options.folder);
  const std::vector<std::string> problems = problems_of(folder);
  for (const std::string& problem : problems) log_error(problem);
  if (!problems.empty()) return 1;
  const Checkpoint checkpoint(folder, Checkpoint::Verify::kWhatIsRead);
  size_t tensors = 0;
  uint64_t bytes = 0;
  for (const File file : kFiles) tensors += checkpoint.names(file).size();
  for (const auto& [name, facts] : checkpoint.files()) bytes += facts.bytes;
  print("%s is whole: step %lld, %zu tensors in %zu files, %s\n", folder.c_str(),
        static_cast<long long>(checkpoint.state().position.step), tensors, checkpoint.files().size(),
        format_bytes(static_cast<double>(bytes)).c_str());
  return 0;
}

void convert(const CheckpointOptions& options) {
  const Checkpoint checkpoint(find_checkpoint(options.folder));
  const Config config =
      parse_config(checkpoint.state().run.config, (checkpoint.folder() / kStateFile).string(), options.overrides);
  const SaveModelOptions how = save_options(config, options.dtype);
  save_model_of(checkpoint, config, options.model, how);
  const std::string warning = missing_tokenizer(how, options.model);
  if (!warning.empty()) log_warning(warning);
  print("saved the model of step %lld in %s\n", static_cast<long long>(checkpoint.state().position.step),
        options.model.c_str());
}

}  // namespace

void add_checkpoint_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<CheckpointOptions>();
  CLI::App* command = app.add_subcommand("checkpoint", "Inspect, verify and convert the checkpoints that train writes");
  command->require_subcommand(1);
  const auto add = [&](const char* name, const char* description) {
    CLI::App* one = command->add_subcommand(name, description);
    one->add_option("folder", options->folder, "A checkpoint, or a folder of checkpoints (the newest is used)")
        ->required();
    return one;
  };
  CLI::App* inspecting =
      add("inspect", "Show step, configuration, files and tensors, without reading the files' content");
  inspecting->add_flag("--tensors", options->tensors, "List every tensor");
  inspecting->add_option("--json", options->json, "File for the result as JSON");
  inspecting->callback([options] { inspect(*options); });

  CLI::App* verifying =
      add("verify", "Check sizes, checksums and tensors of every file; exit code 1 and a list if files are damaged");
  verifying->callback([options, &exit_code] { exit_code = verify(*options); });

  CLI::App* converting = add("convert", "Write a model for transformers");
  converting
      ->add_option("--model", options->model, "Folder for config.json and safetensors files, as save.model writes them")
      ->required();
  converting->add_option("--dtype", options->dtype, "Type of the model's weights")
      ->check(CLI::IsMember({"float32", "bfloat16", "float16"}))
      ->capture_default_str();
  converting
      ->add_option("--set", options->overrides,
                   "Override a key of the run's configuration, such as model.from=FOLDER if the folder has moved")
      ->take_all();
  converting->callback([options] { convert(*options); });
}

}  // namespace twobp
