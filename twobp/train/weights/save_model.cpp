#include "twobp/train/weights/save_model.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/core/pattern.h"
#include "twobp/core/text.h"
#include "twobp/data/images/class_names.h"
#include "twobp/data/text/chat.h"
#include "twobp/data/text/tokenizer.h"
#include "twobp/files/input_file.h"
#include "twobp/files/new_file.h"
#include "twobp/files/new_folder.h"
#include "twobp/files/safetensors.h"
#include "twobp/models/captured.h"
#include "twobp/models/hf_config.h"
#include "twobp/models/model_type.h"
#include "twobp/train/weights/adapter_files.h"

namespace twobp {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kWhole = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

// Files that belong to a model's weights, regardless of who trained it last: those of a tokenizer, and
// others.
constexpr std::array kTokenizerFiles = {"tokenizer.json",
                                        "tokenizer_config.json",
                                        "special_tokens_map.json",
                                        "added_tokens.json",
                                        "chat_template.jinja",
                                        "chat_template.json",
                                        "tokenizer.model",
                                        "spiece.model",
                                        "sentencepiece.bpe.model",
                                        "vocab.json",
                                        "merges.txt",
                                        "vocab.txt"};
constexpr std::array kOtherFiles = {"generation_config.json", "preprocessor_config.json",
                                    "processor_config.json"};

// The names of a tokenizer's files, whether `folder` has them or not, and of its further chat templates
// there.
std::vector<std::string> tokenizer_files(const fs::path& folder) {
  std::vector<std::string> names = additional_chat_templates(folder);
  names.insert(names.begin(), kTokenizerFiles.begin(), kTokenizerFiles.end());
  return names;
}

// Fills files in order, each as far as possible. A larger tensor gets its own file.
std::vector<NamedTensors> into_shards(const NamedTensors& tensors, at::ScalarType dtype, int64_t max_bytes) {
  if (tensors.empty()) return {};
  std::vector<NamedTensors> shards(1);
  int64_t bytes = 0;
  for (const auto& item : tensors) {
    const int64_t size = item.second.numel() * static_cast<int64_t>(c10::elementSize(dtype));
    if (!shards.back().empty() && bytes + size > max_bytes) {
      shards.emplace_back();
      bytes = 0;
    }
    shards.back().push_back(item);
    bytes += size;
  }
  return shards;
}

std::string shard_name(size_t i, size_t count) {
  std::array<char, 64> name{};
  std::snprintf(name.data(), name.size(), "model-%05zu-of-%05zu.safetensors", i + 1, count);
  return name.data();
}

// Files under temporary names that get their names together.
class NewFiles {
 public:
  explicit NewFiles(fs::path folder) : folder_(std::move(folder)) {}

  NewFile& add(const std::string& name) {
    names_.insert(name);
    made_.push_back(std::make_unique<NewFolder>((folder_ / name).parent_path()));
    return *files_.emplace_back(std::make_unique<NewFile>(folder_ / name));
  }
  void finish() {
    for (const auto& file : files_) file->finish();
  }
  void commit() {
    for (const auto& file : files_) file->commit();
    for (const auto& folder : made_) folder->keep();
  }
  const std::set<std::string>& names() const { return names_; }

 private:
  fs::path folder_;
  std::set<std::string> names_;
  std::vector<std::unique_ptr<NewFolder>> made_;
  std::vector<std::unique_ptr<NewFile>> files_;
};

// The files of all processes, in order.
struct Layout {
  int first = 0;  // index of this process's first file
  size_t count = 0;
  json weight_map = json::object();  // tensor -> file; on the first process
  int64_t elements = 0;
  std::set<std::string> names;
};

std::string file_name(size_t i, size_t count) {
  return count == 1 ? kWhole : shard_name(i, count);
}

Layout agree_on_layout(const std::vector<NamedTensors>& shards, const Processes& processes) {
  json mine = json::array();
  int64_t elements = 0;
  for (const NamedTensors& shard : shards) {
    json names = json::array();
    for (const auto& [name, tensor] : shard) {
      names.push_back(name);
      elements += tensor.numel();
    }
    mine.push_back(names);
  }
  const std::vector<std::string> texts =
      processes.to_first(json{{"shards", mine}, {"elements", elements}}.dump());
  std::vector<json> all;
  json counts = json::array();
  for (const std::string& text : texts)
    counts.push_back(all.emplace_back(json::parse(text))["shards"].size());
  counts = json::parse(processes.from_first(counts.dump()));
  Layout layout;
  for (size_t process = 0; process < counts.size(); ++process) {
    if (static_cast<int>(process) < processes.index()) layout.first += counts[process].get<int>();
    layout.count += counts[process].get<size_t>();
  }
  size_t i = 0;
  for (const json& one : all) {
    layout.elements += one["elements"].get<int64_t>();
    for (const json& names : one["shards"]) {
      const std::string file = file_name(i++, layout.count);
      layout.names.insert(file);
      for (const json& name : names) layout.weight_map[name.get<std::string>()] = file;
    }
  }
  return layout;
}

void write_index(NewFiles& files, const Layout& layout, at::ScalarType dtype) {
  if (layout.count == 1) return;
  const auto bytes = layout.elements * static_cast<int64_t>(c10::elementSize(dtype));
  const json index = {{"metadata", {{"total_size", bytes}}}, {"weight_map", layout.weight_map}};
  files.add(kIndex).write(index.dump(2) + "\n");
}

// Whether the file is a link out of its folder, which ends before `name`. The cache of the Hugging Face Hub
// has links from snapshots/REVISION to blobs.
bool leads_out(const fs::path& file, const std::string& name) {
  fs::path root = file;
  for ([[maybe_unused]] const fs::path& part : fs::path(name)) root = root.parent_path();
  std::error_code error;
  const fs::path folder = fs::canonical(root.empty() ? fs::path(".") : root, error);
  const std::string real = fs::canonical(file, error).string();
  const fs::path above = folder.parent_path();
  return !real.starts_with((folder / "").string()) &&
         (above.filename() != "snapshots" ||
          !real.starts_with((above.parent_path() / "blobs" / "").string()));
}

// A link in a folder of a stranger may lead to a file that nobody meant to give away.
void copy_file(NewFiles& files, const fs::path& from, const std::string& name) {
  std::error_code ignored;
  if (!fs::is_regular_file(from, ignored) || leads_out(from, name)) return;
  const InputFile file(from.string());
  NewFile& to = files.add(name);
  constexpr size_t kBlock = size_t{1} << 20U;
  std::vector<uint8_t> block(kBlock);
  for (size_t done = 0; done < file.size(); done += kBlock) {
    const size_t bytes = std::min(kBlock, file.size() - done);
    file.read(done, block.data(), bytes);
    to.write(block.data(), bytes);
  }
}

// Without the tokenizer's files if the run's tokenizer is another one.
void copy_companions(NewFiles& files, const fs::path& from, const fs::path& to, bool with_tokenizer) {
  std::error_code ignored;
  if (fs::equivalent(from, to, ignored)) return;
  for (const char* name : kOtherFiles) copy_file(files, from / name, name);
  if (!with_tokenizer) return;
  for (const std::string& name : tokenizer_files(from)) copy_file(files, from / name, name);
}

bool is_weights_file(const std::string& name) {
  static const Pattern shard("model-[0-9]{5}-of-[0-9]{5}\\.safetensors");
  return name == kWhole || name == kIndex || !shard.match(name).empty();
}

// Whether the folder is saved as a bundle. A captured Hugging Face directory is saved as one of its kind.
bool is_saved_as_bundle(const ModelConfig& config) {
  return config.type.type().is_bundle && is_bundle(config.from);
}

// With the tensors of model.from that are no weights, such as buffers that training never changes. The first
// process has them.
NamedTensors with_others(NamedTensors weights, const ModelConfig& config, const Processes& processes) {
  if (!config.type.type().is_bundle || config.from.empty()) return weights;
  json own = json::array();
  for (const auto& [name, tensor] : weights) own.push_back(name);
  std::set<std::string> known;
  for (const std::string& names : processes.to_first(own.dump()))
    for (const json& name : json::parse(names)) known.insert(name.get<std::string>());
  processes.together([&] {
    if (!processes.is_first()) return;
    const ModelWeights from = config.weights();
    for (const std::string& name : from.names())
      if (!known.contains(name)) weights.emplace_back(name, from.tensor(name));
  });
  return weights;
}

// A bundle's graph, its constants, and what the module came with.
void copy_all_but_weights(NewFiles& files, const fs::path& from, const fs::path& to) {
  std::error_code ignored;
  if (fs::equivalent(from, to, ignored)) return;
  for (const auto& entry : fs::directory_iterator(from)) {
    const std::string name = entry.path().filename().string();
    if (!is_weights_file(name) && name.front() != '.') copy_file(files, entry.path(), name);
  }
  for (const std::string& name : additional_chat_templates(from)) copy_file(files, from / name, name);
}

// A tokenizer.json may have another name where it comes from.
void copy_tokenizer(NewFiles& files, const fs::path& tokenizer, const fs::path& to) {
  std::error_code ignored;
  if (fs::equivalent(tokenizer, to / "tokenizer.json", ignored)) return;
  for (const std::string& name : tokenizer_files(tokenizer.parent_path())) {
    // The user named the tokenizer itself, so that may be a link to anywhere.
    const bool itself = name == "tokenizer.json";
    copy_file(files, itself ? fs::canonical(tokenizer) : tokenizer.parent_path() / name, name);
  }
}

// transformers would prefer an older model.safetensors to the new index.
void remove_stale_weights(const fs::path& folder, const std::set<std::string>& kept) {
  std::vector<fs::path> stale;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (is_weights_file(name) && !kept.contains(name)) stale.push_back(entry.path());
  }
  for (const fs::path& path : stale) {
    std::error_code error;
    TWOBP_CHECK(fs::remove(path, error), "cannot remove ", path.string(),
                " of the model that was there: ", error.message());
  }
}

// What a save of the bundle would leave out is named before training.
void check_links(const fs::path& folder) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    std::error_code missing;
    const bool copied = !is_weights_file(name) && name.front() != '.' && entry.is_regular_file(missing);
    TWOBP_CHECK(
        !copied || !leads_out(entry.path(), name), entry.path().string(),
        ": is a link that leads out of its folder, so save.model cannot copy it: remove it, or put the "
        "file in its place");
  }
}

void check_type(const ModelConfig& config) {
  if (config.type.type().is_bundle) return;
  TWOBP_CHECK(!config.type.type().hf_type.empty(), "a model of type ", config.type.name(),
              " cannot be saved, models that can are: ", hf_models());
}

// Leaves nothing behind: neither the file nor the folder.
void check_writable(const fs::path& folder, const char* file) {
  std::error_code missing;
  if (fs::exists(folder, missing)) {
    const NewFile probe(folder / file);  // the destructor removes it
    return;
  }
  fs::path above = fs::absolute(folder).lexically_normal();
  while (!fs::exists(above, missing) && above.has_relative_path()) above = above.parent_path();
  TWOBP_CHECK(fs::is_directory(above, missing), "cannot create the folder ", folder.string(), ": ",
              above.string(), " is a file");
  TWOBP_CHECK(::access(above.c_str(), W_OK | X_OK) == 0, "cannot create the folder ", folder.string(), ": ",
              std::strerror(errno));
}

void check_no_adapter(const std::string& directory) {
  std::error_code missing;
  TWOBP_CHECK(!fs::exists(fs::path(directory) / kAdapterConfig, missing), directory, ": holds an adapter (",
              kAdapterConfig,
              "), which transformers would add to the model: set save.model to another folder, or remove the "
              "adapter's files");
}

// Of `names`, those that are in the folder but not in `source`, from which a save copies them.
template <typename Names>
std::vector<std::string> left_over(const fs::path& folder, const fs::path& source, const Names& names) {
  std::vector<std::string> left;
  std::error_code missing;
  for (const auto& name : names) {
    const bool replaced = !source.empty() && fs::exists(source / name, missing);
    if (fs::exists(folder / name, missing) && !replaced) left.emplace_back(name);
  }
  return left;
}

void check_companions(const std::string& directory, const ModelConfig& model,
                      const std::optional<std::string>& tokenizer) {
  std::vector<std::string> left = left_over(directory, model.from, kOtherFiles);
  std::error_code missing;
  if (tokenizer && (tokenizer->empty() || fs::exists(*tokenizer, missing))) {
    const fs::path file = tokenizer->empty() ? "" : tokenizer_file(*tokenizer);
    for (const std::string& name :
         left_over(directory, file.empty() ? fs::path(model.from) : file.parent_path(),
                   tokenizer_files(directory))) {
      if (file.empty() || name != "tokenizer.json") left.push_back(name);
    }
  }
  TWOBP_CHECK(
      left.empty(), directory, ": holds ", join(left), " of another model. This run does not replace ",
      left.size() == 1 ? "it" : "them", ", so programs would use ", left.size() == 1 ? "it" : "them",
      " with this model: set save.model to another folder, or remove ", left.size() == 1 ? "it" : "them");
}

}  // namespace

void check_save(const SaveConfig& save, const ModelConfig& model,
                const std::optional<std::string>& tokenizer) {
  check_type(model);
  if (!is_saved_as_bundle(model)) hf_config_json(model, /*sequence=*/1, save.dtype);
  const bool adapter = save.lora == "adapter";
  if (adapter) {
    check_adapter_folder(save.model);
  } else {
    check_no_adapter(save.model);
    check_companions(save.model, model, tokenizer);
    if (is_saved_as_bundle(model)) check_links(model.from);
  }
  check_writable(save.model, adapter ? kAdapterConfig : kWhole);
}

SaveModelOptions save_options(const Config& config, const std::string& dtype) {
  const ModelInput input = config.model.input();
  SaveModelOptions options{.dtype = dtype, .tokenizer = tokenizer_of(config.data, input)};
  try {
    options.class_names = class_names(config.data, input);
  } catch (const Error&) {
    // The pictures are gone. The trained weights are worth more than the names.
  }
  return options;
}

std::string missing_tokenizer(const SaveModelOptions& options, const std::string& directory) {
  if (options.tokenizer.empty() || fs::exists(options.tokenizer)) return "";
  return concat(options.tokenizer, ", the run's tokenizer, no longer exists and was not saved: copy it into ",
                directory);
}

void save_model(const std::string& directory, const ModelConfig& config, int64_t sequence,
                const std::vector<Parameter*>& weights, const SaveModelOptions& options,
                const Processes& processes) {
  NamedTensors merged;
  processes.together([&] { merged = merged_weights(weights, config); });
  save_model(directory, config, sequence, merged, options, processes);
}

void save_model(const std::string& directory, const ModelConfig& config, int64_t sequence,
                const NamedTensors& given, const SaveModelOptions& options, const Processes& processes) {
  const fs::path folder(directory);
  const bool first = processes.is_first();
  at::ScalarType dtype = at::kFloat;
  std::string description;
  std::optional<NewFolder> made;
  processes.together([&] {
    dtype = parse_saved_dtype(options.dtype);
    check_type(config);
    check_trained(given);
    if (!first) return;
    check_no_adapter(directory);
    if (!is_saved_as_bundle(config)) {
      json described = hf_config_json(config, sequence, options.dtype);
      if (!options.class_names.empty()) name_classes(described, options.class_names);
      description = described.dump(2) + "\n";
    }
    made.emplace(directory);
  });
  const NamedTensors weights = with_others(given, config, processes);
  std::vector<std::string> names;
  for (const auto& [name, tensor] : weights) names.push_back(name);
  const std::vector<bool> mine = processes.writes(names);
  NamedTensors tensors;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (mine[i]) tensors.push_back(weights[i]);
  }
  const std::vector<NamedTensors> shards = into_shards(tensors, dtype, options.max_shard_bytes);
  const Layout layout = agree_on_layout(shards, processes);

  NewFiles weight_files(folder);
  NewFiles others(folder);
  processes.together([&] {
    for (size_t i = 0; i < shards.size(); ++i) {
      NewFile& file = weight_files.add(file_name(layout.first + i, layout.count));
      write_safetensors(file, shards[i], {{"format", "pt"}}, dtype);
      file.finish();
    }
    if (!first) return;
    write_index(others, layout, dtype);
    if (is_saved_as_bundle(config)) {
      copy_all_but_weights(others, config.from, folder);
    } else {
      others.add(kModelConfig).write(description);
      if (!config.from.empty()) copy_companions(others, config.from, folder, options.tokenizer.empty());
    }
    if (fs::exists(options.tokenizer)) copy_tokenizer(others, tokenizer_file(options.tokenizer), folder);
    others.finish();
  });
  processes.together([&] { weight_files.commit(); });
  processes.together([&] {
    if (!first) return;
    std::set<std::string> kept = layout.names;
    for (const std::string& name : kept) {
      TWOBP_CHECK(fs::exists(folder / name), "save.model: another process wrote ", name, " but ", directory,
                  " does not contain it: use a folder on a file system that all processes share");
    }
    others.commit();
    kept.insert(others.names().begin(), others.names().end());
    remove_stale_weights(folder, kept);
    made->keep();
  });
}

}  // namespace twobp
