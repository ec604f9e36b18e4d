// Finds the files that a configuration names by a pattern.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace twobp {

// The files (not folders) that match the glob, sorted by name as bytes. A leading ~ is the home folder. A pattern that
// is itself the name of a file stands for that file, whatever characters it contains. Throws Error that names the
// configuration key if nothing matches, only folders match (suggesting "folder/*" plus `extension`), or a folder on the
// way cannot be read.
std::vector<std::string> matching_files(const std::string& pattern, std::string_view key, std::string_view extension);

}  // namespace twobp
