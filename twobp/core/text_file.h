// Whole files of text.
#pragma once

#include <cstdint>
#include <string>

namespace twobp {

// Throws Error if the file is missing, unreadable, no regular file, or longer than `max_bytes` (no more of it is read).
// Streams that the program was given may be read: /dev/stdin, or <(...) of a shell.
std::string read_text(const std::string& path, uint64_t max_bytes);

// Replaces the file. For results: a file that must stay whole if this fails is a NewFile. Throws Error that names the
// file.
void write_text(const std::string& path, const std::string& text);

}  // namespace twobp
