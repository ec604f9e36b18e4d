#include "twobp/files/hub_hint.h"

#include <filesystem>
#include <system_error>

#include "twobp/core/check.h"
#include "twobp/core/text.h"

namespace twobp {

std::string hub_hint(const std::string& path) {
  // "org/name", or "name" of an old model, such as gpt2.
  static const Pattern hub_name("([A-Za-z0-9][A-Za-z0-9._-]*/)?[A-Za-z0-9][A-Za-z0-9._-]*");
  std::error_code missing;
  if (hub_name.match(path).empty() || std::filesystem::exists(path, missing)) return "";
  return concat(" (if ", path, " is a name on the Hugging Face Hub, download it first: hf download ", path,
                " --local-dir ", path, ")");
}

}  // namespace twobp
