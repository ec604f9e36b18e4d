// Checks that a file is a text before it is read as one, byte by byte or by a tokenizer.
#pragma once

#include "twobp/files/input_file.h"

namespace twobp {

// Throws Error that says what to do for a file that is no plain text: of another format, by its name or its first
// bytes, or with bytes that are not UTF-8 or are zero. The error names the first such byte.
void check_text(const InputFile& file);

}  // namespace twobp
