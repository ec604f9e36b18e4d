// Advice for a user who gives the name of a model on the Hugging Face Hub in place of a folder.
#pragma once

#include <string>

namespace twobp {

// For a message that `path` is missing: how to download the model. Empty if `path` exists, or does not
// look like "org/name" or "name".
std::string hub_hint(const std::string& path);

}  // namespace twobp
