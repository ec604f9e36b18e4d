#include "twobp/data/images/class_names.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include <nlohmann/json.hpp>

#include "twobp/data/images/image_folder.h"
#include "twobp/files/json_file.h"

namespace twobp {
namespace {

constexpr int kConfigDepth = 64;

// The model's names by number. Empty if it has none, or has not one for each number.
std::vector<std::string> names_in(const std::string& model) {
  const std::filesystem::path path = std::filesystem::path(model) / "config.json";
  std::error_code missing;
  if (model.empty() || !std::filesystem::exists(path, missing)) return {};
  const nlohmann::json config = read_json_object(path.string(), kConfigDepth);
  const auto labels = config.find("id2label");
  if (labels == config.end() || !labels->is_object()) return {};
  std::vector<std::string> names;
  for (size_t number = 0; number < labels->size(); ++number) {
    const auto name = labels->find(std::to_string(number));
    if (name == labels->end() || !name->is_string()) return {};
    names.push_back(name->get<std::string>());
  }
  return names;
}

}  // namespace

std::vector<std::string> class_names(const DataConfig& data, const ModelInput& model) {
  if (data.images.empty()) return {};
  const std::vector<std::string> folders = class_folders(data.images);
  const std::vector<std::string> names = names_in(model.from);
  const bool same = std::is_permutation(names.begin(), names.end(), folders.begin(), folders.end());
  return same ? names : folders;
}

}  // namespace twobp
