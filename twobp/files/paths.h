// Finds the files that a configuration names by a pattern.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace twobp {

// The files (not folders) that match the glob, sorted by name as bytes. A leading ~ is the home folder. A
// pattern that is itself the name of a file stands for that file, whatever characters it contains. Throws
// Error that names the configuration key if nothing matches, only folders match (suggesting "folder/*" plus
// `extension`), or a folder on the way cannot be read.
std::vector<std::string> matching_files(const std::string& pattern, std::string_view key, std::string_view extension);

// Advice for a user who gives the name of a model on the Hugging Face Hub in place of a folder.
// For a message that `path` is missing: how to download the model. Empty if `path` exists, or does not
// look like "org/name" or "name".
std::string hub_hint(const std::string& path);

// Files are told apart by their extension, in whatever case it is written.
// ".npy" for "a/b.NPY"; empty without one.
std::string lower_extension(const std::filesystem::path& path);

// The folder for what is computed once and kept: tokenized text, captured models.
// `configured` (data.cache) or, if that is empty, $XDG_CACHE_HOME/twobp or ~/.cache/twobp. Throws Error if
// none of them is known; `what` is to be kept there.
std::filesystem::path cache_folder(const std::string& configured, const char* what);

// While this object lives, the folder is locked against other writers.
class LockedFolder {
 public:
  // Makes the folder, and waits for its other users. Throws Error if it cannot be written.
  LockedFolder(const std::filesystem::path& folder, const char* what);
  ~LockedFolder();
  LockedFolder(const LockedFolder&) = delete;
  LockedFolder& operator=(const LockedFolder&) = delete;

 private:
  int fd_ = -1;
};

// The size, inode and times of change of a file, as text: equal while its content is. A program can set a
// file's time of modification (cp -p, rsync, touch), but not the time at which its content or that time was
// changed (ctime). Throws Error if there is no such file.
std::string state_of_file(const std::filesystem::path& file);

}  // namespace twobp
