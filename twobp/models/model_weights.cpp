#include "twobp/models/model_weights.h"

#include <algorithm>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "twobp/core/check.h"
#include "twobp/files/input_file.h"

namespace twobp {
namespace {

namespace fs = std::filesystem;

constexpr const char* kWhole = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";
constexpr uint64_t kMaxIndexBytes = 100'000'000;
constexpr int kMaxIndexDepth = 8;

// A plain name: no folder, not hidden, no control characters for the terminal.
bool is_shard_name(const std::string& name) {
  constexpr size_t kLongest = 255;
  if (name.empty() || name.size() > kLongest || name.front() == '.' || !name.ends_with(".safetensors")) {
    return false;
  }
  return name.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos &&
         std::none_of(name.begin(), name.end(), [](unsigned char c) { return c < ' ' || c == 0x7f; });
}

}  // namespace

bool same_values(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return false;
  return a.scalar_type() == b.scalar_type() ? at::equal(a, b) : at::equal(a.to(at::kFloat), b.to(at::kFloat));
}

at::Tensor ExpertStack::part(const at::Tensor& whole, size_t i) const {
  at::Tensor expert = whole.select(0, static_cast<int64_t>(i / projections));
  if (transposed && expert.dim() == 2) expert = expert.t();
  const auto count = static_cast<int64_t>(projections);
  const auto one = static_cast<int64_t>(i % projections);
  return interleaved ? expert.unflatten(0, {-1, count}).select(1, one) : expert.chunk(count)[i % projections];
}

at::Tensor ExpertStack::whole(const std::vector<at::Tensor>& given) const {
  const at::Tensor experts = at::stack(given).unflatten(0, {-1, static_cast<int64_t>(projections)});
  at::Tensor whole = (interleaved ? experts.transpose(1, 2) : experts).flatten(1, 2);
  if (transposed && whole.dim() == 3) whole = whole.transpose(1, 2);
  return whole.contiguous();
}

ModelWeights::ModelWeights(std::string directory, TensorNames naming)
    : directory_(std::move(directory)), naming_(std::move(naming)) {
  const fs::path folder(directory_);
  std::error_code ignored;
  TWOBP_CHECK(fs::is_directory(folder, ignored), directory_,
              fs::exists(folder, ignored) ? ": is not a folder: " : ": there is no such folder: ",
              "give a Hugging Face model directory, with config.json and ", kWhole);
  if (fs::exists(folder / kWhole, ignored)) {
    files_.emplace_back((folder / kWhole).string());
    for (const std::string& name : files_.front().names()) file_of_[name] = 0;
  } else if (fs::exists(folder / kIndex, ignored)) {
    read_index((folder / kIndex).string());
  } else {
    const bool pickled = fs::exists(folder / "pytorch_model.bin", ignored) ||
                         fs::exists(folder / "pytorch_model.bin.index.json", ignored);
    fail(directory_, ": has neither ", kWhole, " nor ", kIndex,
         pickled ? "; pytorch_model.bin is not read: load it with transformers and save_pretrained() it" : "");
  }
  if (naming_.rename) rename();
  for (const auto& [name, stack] : naming_.stacks) {
    if (contains(name)) take_apart(name, stack);
  }
  for (const auto& [one, other] : naming_.same) {
    copy_name(one, other);
    copy_name(other, one);
  }
}

void ModelWeights::rename() {
  std::map<std::string, size_t> renamed;
  for (const auto& [name, at] : file_of_) {
    const std::string to = naming_.rename(name);
    if (to.empty()) {
      without_use_.push_back(name);
      continue;
    }
    if (renamed.emplace(to, at).second) {
      if (to != name) stored_[to] = name;
      continue;
    }
    const std::string& other = stored(to);
    TWOBP_CHECK(same_values(files_[at].tensor(name), files_[renamed[to]].tensor(other)), directory_, ": has both ",
                name.substr(0, 100), " and ", other.substr(0, 100),
                ", two names of one tensor, with different values: remove the wrong one");
  }
  file_of_ = std::move(renamed);
}

void ModelWeights::take_apart(const std::string& name, const ExpertStack& stack) {
  const std::vector<int64_t> sizes = shape(name);
  const size_t outputs = sizes.size() - (sizes.size() == 3 && !stack.transposed ? 2 : 1);
  const bool fits = (sizes.size() == 2 || sizes.size() == 3) &&
                    sizes[0] * static_cast<int64_t>(stack.projections) == static_cast<int64_t>(stack.parts.size()) &&
                    sizes[outputs] % static_cast<int64_t>(stack.projections) == 0;
  TWOBP_CHECK(fits, directory_, ": ", name, " is ", at::IntArrayRef(sizes), ", not a stack of ",
              stack.parts.size() / stack.projections, " experts, as config.json says");
  const std::string place = stored(name);
  const size_t at = file_of_.at(name);
  file_of_.erase(name);
  for (size_t i = 0; i < stack.parts.size(); ++i) {
    const std::string& part = stack.parts[i];
    TWOBP_CHECK(file_of_.emplace(part, at).second, directory_, ": has both ", name, " and ", part,
                ", which is a part of it: remove one");
    stored_[part] = place;
    in_stack_[part] = {&stack, i};
  }
}

at::Tensor ModelWeights::tensor(const std::string& name) const {
  at::Tensor tensor = file(name).tensor(stored(name));
  const auto found = in_stack_.find(name);
  return found == in_stack_.end() ? tensor : found->second.first->part(tensor, found->second.second);
}

std::vector<int64_t> ModelWeights::shape(const std::string& name) const {
  const std::vector<int64_t>& sizes = file(name).shape(stored(name));
  const auto found = in_stack_.find(name);
  if (found == in_stack_.end()) return sizes;
  const auto& [stack, i] = found->second;
  return stack->part(at::empty(sizes, at::TensorOptions().device(at::kMeta)), i).sizes().vec();
}

void ModelWeights::copy_name(const std::string& from, const std::string& to) {
  const auto found = file_of_.find(from);
  if (found == file_of_.end() || contains(to)) return;
  const std::string place = stored(from);
  file_of_[to] = found->second;
  stored_[to] = place;
}

const std::string& ModelWeights::stored(const std::string& name) const {
  const auto found = stored_.find(name);
  return found == stored_.end() ? name : found->second;
}

void ModelWeights::read_index(const std::string& path) {
  const auto index = read_json_object(path, kMaxIndexDepth, kMaxIndexBytes);
  const auto weights = index.find("weight_map");
  TWOBP_CHECK(weights != index.end() && weights->is_object(), path, ": has no weight_map");
  std::map<std::string, size_t> opened;
  for (const auto& [name, value] : weights->items()) {
    TWOBP_CHECK(value.is_string(), path, ": the file of \"", name.substr(0, 100), "\" is not a text");
    const auto& file = value.get_ref<const std::string&>();
    TWOBP_CHECK(is_shard_name(file), path, ": the file of \"", name.substr(0, 100),
                "\" must be a .safetensors file in the same folder");
    const auto [at, is_new] = opened.try_emplace(file, files_.size());
    if (is_new) files_.emplace_back((fs::path(directory_) / file).string());
    TWOBP_CHECK(files_[at->second].contains(name), files_[at->second].path(), ": has no \"", name.substr(0, 100),
                "\", though ", kIndex, " says so");
    file_of_[name] = at->second;
  }
  for (const SafetensorsFile& file : files_) {
    for (const std::string& name : file.names()) {
      TWOBP_CHECK(contains(name), file.path(), ": has \"", name.substr(0, 100), "\", which is not in ", kIndex);
      TWOBP_CHECK(&files_[file_of_.at(name)] == &file, file.path(), ": has \"", name.substr(0, 100), "\", which ",
                  kIndex, " says is in another file");
    }
  }
}

std::vector<std::string> ModelWeights::names() const {
  std::vector<std::string> names;
  for (const auto& [name, file] : file_of_) names.push_back(name);
  return names;
}

const SafetensorsFile& ModelWeights::file(const std::string& name) const {
  const auto found = file_of_.find(name);
  TWOBP_CHECK(found != file_of_.end(), directory_, ": there is no tensor \"", name, "\"");
  return files_[found->second];
}

}  // namespace twobp
