#include "twobp/files/new_folder.h"

#include <system_error>

#include "twobp/core/check.h"

namespace twobp {

NewFolder::NewFolder(const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::path at = std::filesystem::absolute(path, error).lexically_normal();
  if (at.filename().empty()) at = at.parent_path();  // "folder/"
  for (; !std::filesystem::exists(at, error) && at.has_relative_path(); at = at.parent_path()) {
    made_.push_back(at);
  }
  error.clear();
  std::filesystem::create_directories(path, error);
  if (!error) return;
  const std::string reason = error.message();
  for (const auto& folder : made_) std::filesystem::remove(folder, error);
  fail("cannot create the folder ", path.string(), ": ", reason);
}

NewFolder::~NewFolder() {
  std::error_code error;
  for (const auto& folder : made_) {
    if (!std::filesystem::is_directory(folder, error) || !std::filesystem::remove(folder, error)) return;
  }
}

}  // namespace twobp
