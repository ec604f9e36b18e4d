// File formats that are known by their first bytes: what users give by mistake in place of texts and tokens.
#pragma once

#include <string_view>

#include "twobp/files/input_file.h"

namespace twobp {

struct KnownFormat {
  std::string_view mark;       // the first bytes
  std::string_view is;         // "is a NumPy file"
  std::string_view as_tokens;  // what to do if it was given as tokens; empty: tokens may begin like this
  std::string_view as_text;    // the same for a text
};

// Null for a file of another format.
const KnownFormat* known_format(const InputFile& file);

}  // namespace twobp
