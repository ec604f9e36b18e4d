// What to do about a name of the Hugging Face Hub where a folder is asked for.
#pragma once

#include <string>

namespace twobp {

// For a message that `path` is missing. Empty if `path` exists, or does not look like "org/name" or "name".
std::string hub_hint(const std::string& path);

}  // namespace twobp
