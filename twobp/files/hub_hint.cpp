#include "twobp/files/hub_hint.h"

#include <filesystem>
#include <system_error>

#include "twobp/core/check.h"

namespace twobp {

std::string hub_hint(const std::string& path) {
  const size_t slash = path.find('/');
  const bool two_names = slash != std::string::npos && slash > 0 && slash + 1 < path.size() &&
                         path.find('/', slash + 1) == std::string::npos && path[0] != '.';
  std::error_code missing;
  if (!two_names || std::filesystem::exists(path, missing)) return "";
  return concat(" (if ", path, " is a name on the Hugging Face Hub, download it first: hf download ", path,
                " --local-dir ", path, ")");
}

}  // namespace twobp
