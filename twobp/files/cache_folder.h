// The folder for what is computed once and kept: tokenized text, captured models.
#pragma once

#include <filesystem>
#include <string>

namespace twobp {

// `configured` (data.cache) or, if that is empty, $XDG_CACHE_HOME/twobp or ~/.cache/twobp. Throws Error if none of them
// is known; `what` is to be kept there.
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

// The size, inode and times of change of a file, as text: equal while its content is. A program can set a file's time
// of modification (cp -p, rsync, touch), but not the time at which its content or that time was changed (ctime). Throws
// Error if there is no such file.
std::string state_of_file(const std::filesystem::path& file);

}  // namespace twobp
