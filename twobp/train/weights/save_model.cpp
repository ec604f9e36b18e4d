#include "twobp/train/weights/save_model.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <memory>
#include <optional>
#include <set>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/data/pixel_dataset.h"
#include "twobp/data/text/tokenizer.h"
#include "twobp/files/input_file.h"
#include "twobp/files/new_file.h"
#include "twobp/files/safetensors.h"
#include "twobp/models/captured.h"
#include "twobp/models/hf_config.h"
#include "twobp/models/model_type.h"
#include "twobp/train/weights/weight_files.h"

namespace twobp {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kWhole = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

// Files that belong to a model's weights, regardless of who trained it last: those of a tokenizer, and
// others.
constexpr const char* kTokenizerFiles =
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json chat_template.jinja "
    "chat_template.json tokenizer.model spiece.model sentencepiece.bpe.model vocab.json merges.txt vocab.txt";
constexpr std::array kOtherFiles = {"generation_config.json", "preprocessor_config.json", "processor_config.json"};

// A tokenizer's chat templates besides its main one, in its folder: "additional_chat_templates/NAME.jinja", by name.
std::vector<std::string> additional_chat_templates(const fs::path& folder) {
  const std::string within = "additional_chat_templates/";
  std::vector<std::string> names;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(folder / within, none)) {
    if (entry.path().extension() == ".jinja") names.push_back(within + entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

// The names of a tokenizer's files, whether `folder` has them or not, and of its further chat templates
// there.
std::vector<std::string> tokenizer_files(const fs::path& folder) {
  std::vector<std::string> names = split(kTokenizerFiles, ' ');
  for (std::string& name : additional_chat_templates(folder)) names.push_back(std::move(name));
  return names;
}

// Fills files in order, each as far as possible. A larger tensor gets its own file.
std::vector<NamedTensors> into_shards(const NamedTensors& tensors, const StoredTypes& types, int64_t max_bytes) {
  if (tensors.empty()) return {};
  std::vector<NamedTensors> shards(1);
  int64_t bytes = 0;
  for (const auto& item : tensors) {
    const int64_t size = types.bytes_of(item.first, item.second);
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
  int64_t bytes = 0;
  std::set<std::string> names;
};

std::string file_name(size_t i, size_t count) {
  return count == 1 ? kWhole : shard_name(i, count);
}

Layout agree_on_layout(const std::vector<NamedTensors>& shards, const StoredTypes& types, const Processes& processes) {
  json mine = json::array();
  int64_t bytes = 0;
  for (const NamedTensors& shard : shards) {
    json names = json::array();
    for (const auto& [name, tensor] : shard) {
      names.push_back(name);
      bytes += types.bytes_of(name, tensor);
    }
    mine.push_back(names);
  }
  const std::vector<std::string> texts = processes.to_first(json{{"shards", mine}, {"bytes", bytes}}.dump());
  std::vector<json> all;
  json counts = json::array();
  for (const std::string& text : texts) counts.push_back(all.emplace_back(json::parse(text))["shards"].size());
  counts = json::parse(processes.from_first(counts.dump()));
  Layout layout;
  for (size_t process = 0; process < counts.size(); ++process) {
    if (static_cast<int>(process) < processes.index()) layout.first += counts[process].get<int>();
    layout.count += counts[process].get<size_t>();
  }
  size_t i = 0;
  for (const json& one : all) {
    layout.bytes += one["bytes"].get<int64_t>();
    for (const json& names : one["shards"]) {
      const std::string file = file_name(i++, layout.count);
      layout.names.insert(file);
      for (const json& name : names) layout.weight_map[name.get<std::string>()] = file;
    }
  }
  return layout;
}

void write_index(NewFiles& files, const Layout& layout) {
  if (layout.count == 1) return;
  const json index = {{"metadata", {{"total_size", layout.bytes}}}, {"weight_map", layout.weight_map}};
  files.add(kIndex).write(index.dump(2) + "\n");
}

// A file that is copied into the saved model.
struct Companion {
  fs::path from;
  std::string name;
};

bool is_below(const fs::path& file, const fs::path& folder) {
  return std::mismatch(folder.begin(), folder.end(), file.begin(), file.end()).first == folder.end();
}

// Whoever made the model's folder must not choose which of the user's files are copied into another one. So a
// link may lead to a file of the same folder or, as in Hugging Face's cache, of the same model:
// snapshots/REVISION/NAME -> ../../blobs/HASH. Throws Error for other links.
void check_link(const fs::path& folder, const fs::path& file) {
  const fs::path home = fs::canonical(folder);
  const fs::path target = fs::canonical(file);
  const bool cached =
      home.parent_path().filename() == "snapshots" && is_below(target, home.parent_path().parent_path() / "blobs");
  TWOBP_CHECK(cached || is_below(target, home), file.string(), ": links to ", target.string(),
              ", outside of its folder, and would be copied into the saved model: replace the link by the "
              "file, or remove it");
}

// Adds the files of `names` that the folder has. Throws Error as check_link does.
template <typename Names>
void add_companions(std::vector<Companion>& all, const fs::path& folder, const Names& names) {
  for (const auto& name : names) {
    std::error_code ignored;
    if (!fs::is_regular_file(folder / name, ignored)) continue;
    check_link(folder, folder / name);
    all.push_back({folder / name, name});
  }
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

// Sends the parts of stacks that several processes hold to the first.
NamedTensors with_parts_of_others(NamedTensors weights, const TensorNames& naming, const Processes& processes) {
  std::set<std::string> held;
  for (const auto& [name, tensor] : weights) held.insert(name);
  std::set<std::string> apart;
  for (const auto& [name, stack] : naming.stacks) {
    const auto here = [&](const std::string& part) { return held.contains(part); };
    if (std::all_of(stack.parts.begin(), stack.parts.end(), here)) continue;
    std::copy_if(stack.parts.begin(), stack.parts.end(), std::inserter(apart, apart.end()), here);
  }
  const std::vector<bool> mine = processes.writes({apart.begin(), apart.end()});
  std::map<std::string, at::Tensor> sent;
  for (size_t i = 0; const std::string& name : apart) {
    if (mine[i++]) sent[name];
  }
  for (const auto& [name, tensor] : weights) {
    if (const auto found = sent.find(name); found != sent.end()) found->second = tensor;
  }
  std::erase_if(weights, [&](const auto& one) { return apart.contains(one.first); });
  json names = json::array();
  Values tensors;
  for (const auto& [name, tensor] : sent) {
    names.push_back(name);
    tensors.push_back(tensor);
  }
  const std::vector<std::string> all_names = processes.to_first(names.dump());
  const std::vector<Values> all_tensors = processes.tensors_to_first(tensors);
  for (size_t process = 0; process < all_names.size(); ++process) {
    const json there = json::parse(all_names[process]);
    for (size_t i = 0; i < there.size(); ++i)
      weights.emplace_back(there[i].get<std::string>(), all_tensors[process].at(i));
  }
  return weights;
}

// The weights of all experts of a layer become one tensor, in architectures whose files have that.
NamedTensors in_stacks(NamedTensors weights, const ModelConfig& config, const Processes& processes) {
  const ModelType& type = config.type.type();
  const TensorNames naming = type.names(config.type);
  if (!naming.writes_stacks) return weights;
  weights = with_parts_of_others(std::move(weights), naming, processes);
  std::map<std::string, size_t> place;  // by name
  for (size_t i = 0; i < weights.size(); ++i) place[weights[i].first] = i;
  for (const auto& [name, stack] : naming.stacks) {
    if (!place.contains(stack.parts.front())) continue;  // of another process
    std::vector<at::Tensor> parts;
    for (const std::string& part : stack.parts) {
      const auto found = place.find(part);
      TWOBP_CHECK(found != place.end(), "a ", type.name, " is saved with all experts of a layer in one tensor, but ",
                  part, " is not in this process");
      parts.push_back(std::exchange(weights[found->second].second, {}));
    }
    weights[place.at(stack.parts.front())] = {name, stack.whole(parts)};
  }
  std::erase_if(weights, [](const auto& one) { return !one.second.defined(); });
  return weights;
}

// A bundle's graph, its constants, and what the module came with.
std::vector<std::string> all_but_weights(const fs::path& folder) {
  std::vector<std::string> names = additional_chat_templates(folder);
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (!is_weights_file(name) && name.front() != '.') names.push_back(name);
  }
  return names;
}

// What is copied into `to`: files of model.from, and those of the run's tokenizer if it is another one.
std::vector<Companion> companions_of(const ModelConfig& config, const fs::path& tokenizer, const fs::path& to) {
  std::vector<Companion> all;
  std::error_code ignored;
  const fs::path from(config.from);
  if (!from.empty() && !fs::equivalent(from, to, ignored)) {
    if (is_saved_as_bundle(config)) {
      add_companions(all, from, all_but_weights(from));
    } else {
      add_companions(all, from, kOtherFiles);
      if (tokenizer.empty()) add_companions(all, from, tokenizer_files(from));
    }
  }
  // A tokenizer.json may have another name where it comes from.
  if (!tokenizer.empty() && fs::exists(tokenizer, ignored)) {
    const fs::path file = tokenizer_file(tokenizer);
    if (fs::equivalent(file, to / "tokenizer.json", ignored)) return all;
    std::vector<std::string> names = tokenizer_files(file.parent_path());
    std::erase(names, "tokenizer.json");
    add_companions(all, file.parent_path(), names);
    if (!from.empty() && fs::equivalent(file.parent_path(), from, ignored)) check_link(from, file);
    all.push_back({file, "tokenizer.json"});
  }
  return all;
}

void copy(NewFiles& files, const Companion& companion) {
  const InputFile from(companion.from.string());
  NewFile& to = files.add(companion.name);
  std::vector<char> block(std::min(from.size(), size_t{1} << 20U));
  for (size_t at = 0; at < from.size(); at += block.size()) {
    const size_t bytes = std::min(block.size(), from.size() - at);
    from.read(at, block.data(), bytes);
    to.write(block.data(), bytes);
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

void check_type(const ModelConfig& config) {
  if (config.type.type().is_bundle) return;
  TWOBP_CHECK(!config.type.type().hf_type.empty(), "a model of type ", config.type.name(),
              " cannot be saved, models that can are: ", hf_models());
}

// The path itself, or what exists of the folders above it.
fs::path nearest_existing(const fs::path& path) {
  std::error_code missing;
  fs::path above = fs::absolute(path).lexically_normal();
  while (!fs::exists(above, missing) && above.has_relative_path()) above = above.parent_path();
  return above;
}

// Leaves nothing behind: neither the file nor the folder.
void check_writable(const fs::path& folder, const char* file) {
  std::error_code missing;
  if (fs::exists(folder, missing)) {
    const NewFile probe(folder / file);  // the destructor removes it
    return;
  }
  const fs::path above = nearest_existing(folder);
  TWOBP_CHECK(fs::is_directory(above, missing), "cannot create the folder ", folder.string(), ": ", above.string(),
              " is a file");
  TWOBP_CHECK(::access(above.c_str(), W_OK | X_OK) == 0, "cannot create the folder ", folder.string(), ": ",
              std::strerror(errno));
}

// Before training: afterwards, a full disk would leave the weights unsaved.
void check_room(const fs::path& to, const std::vector<Companion>& companions) {
  std::error_code error;
  const fs::path folder = nearest_existing(to);
  const uint64_t free = fs::space(folder, error).available;
  if (error) return;
  uint64_t bytes = 0;
  for (const Companion& one : companions) {
    const uint64_t more = InputFile(one.from.string()).size();
    bytes += more;
    TWOBP_CHECK(bytes <= free, one.from.string(), ": has ", more,
                " bytes and is copied into the saved model, but the disk of ", folder.string(), " has only ", free,
                ": remove it, or set save.model to a folder on another disk");
  }
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
         left_over(directory, file.empty() ? fs::path(model.from) : file.parent_path(), tokenizer_files(directory))) {
      if (file.empty() || name != "tokenizer.json") left.push_back(name);
    }
  }
  TWOBP_CHECK(left.empty(), directory, ": holds ", join(left), " of another model. This run does not replace ",
              left.size() == 1 ? "it" : "them", ", so programs would use ", left.size() == 1 ? "it" : "them",
              " with this model: set save.model to another folder, or remove ", left.size() == 1 ? "it" : "them");
}

}  // namespace

void check_save(const SaveConfig& save, const ModelConfig& model, const std::optional<std::string>& tokenizer) {
  check_type(model);
  if (!is_saved_as_bundle(model)) hf_config_json(model, /*sequence=*/1, save.dtype);
  const bool adapter = save.lora == "adapter";
  if (adapter) {
    check_adapter_folder(save.model);
  } else {
    check_no_adapter(save.model);
    check_companions(save.model, model, tokenizer);
    check_room(save.model, companions_of(model, tokenizer.value_or(""), save.model));
  }
  check_writable(save.model, adapter ? kAdapterConfig : kWhole);
}

SaveModelOptions save_options(const Config& config, const std::string& dtype) {
  const ModelInput input = config.model.input();
  SaveModelOptions options{.dtype = dtype, .tokenizer = tokenizer_of(config.data, input)};
  try {
    options.class_names = class_names(config.data);
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
                const std::vector<Parameter*>& weights, const SaveModelOptions& options, const Processes& processes) {
  NamedTensors merged;
  processes.together([&] { merged = merged_weights(weights, config); });
  save_model(directory, config, sequence, merged, options, processes);
}

void save_model(const std::string& directory, const ModelConfig& config, int64_t sequence, const NamedTensors& given,
                const SaveModelOptions& options, const Processes& processes) {
  const fs::path folder(directory);
  const bool first = processes.is_first();
  StoredTypes types;
  std::string description;
  std::optional<NewFolder> made;
  processes.together([&] {
    check_type(config);
    types = {parse_saved_dtype(options.dtype), config.type.type().names(config.type).in_float32};
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
  const NamedTensors weights = in_stacks(with_others(given, config, processes), config, processes);
  std::vector<std::string> names;
  for (const auto& [name, tensor] : weights) names.push_back(name);
  const std::vector<bool> mine = processes.writes(names);
  NamedTensors tensors;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (mine[i]) tensors.push_back(weights[i]);
  }
  const std::vector<NamedTensors> shards = into_shards(tensors, types, options.max_shard_bytes);
  const Layout layout = agree_on_layout(shards, types, processes);

  NewFiles weight_files(folder);
  NewFiles others(folder);
  processes.together([&] {
    for (size_t i = 0; i < shards.size(); ++i) {
      NewFile& file = weight_files.add(file_name(layout.first + i, layout.count));
      write_safetensors(file, shards[i], {{"format", "pt"}}, types);
      file.finish();
    }
    if (!first) return;
    write_index(others, layout);
    if (!is_saved_as_bundle(config)) others.add(kModelConfig).write(description);
    for (const Companion& one : companions_of(config, options.tokenizer, folder)) copy(others, one);
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
