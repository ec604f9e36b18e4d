// Files are told apart by their extension, in whatever case it is written.
#pragma once

#include <filesystem>
#include <string>

namespace twobp {

// ".npy" for "a/b.NPY"; empty without one.
std::string lower_extension(const std::filesystem::path& path);

}  // namespace twobp
