// The files a configuration names by a pattern.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace twobp {

// The files (folders are skipped) that match the glob, sorted by name as bytes; a leading ~ is the home
// folder. A pattern that is itself the name of a file stands for that file, whatever characters are in it.
// Throws Error, naming the configuration key: nothing matches, only folders do (and then what to write
// instead, "folder/*" plus `extension`), a folder on the way cannot be read.
std::vector<std::string> matching_files(const std::string& pattern, std::string_view key,
                                        std::string_view extension);

}  // namespace twobp
