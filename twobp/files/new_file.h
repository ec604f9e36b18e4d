// A file that gets its name only when all of it is on disk, so that a killed run leaves the old file or none.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

namespace twobp {

class NewFile {
 public:
  // Starts a file with `path` plus ".new" as its name. Every member throws Error if the file cannot be
  // created, written, synced or renamed, or if a folder of that name exists.
  explicit NewFile(std::filesystem::path path);
  // Removes the file unless it was committed.
  ~NewFile();
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void write(const void* data, size_t bytes);
  void write(const std::string& text) { write(text.data(), text.size()); }
  // Syncs the file to disk under its temporary name. For several files that belong together, call this for
  // all before the first commit, so that a full disk changes none of them.
  void finish();
  // Calls finish() if needed, renames the file and syncs the folder.
  void commit();

  const std::filesystem::path& path() const { return path_; }

 private:
  void check(bool ok, const char* what) const;

  std::filesystem::path path_;
  std::filesystem::path aside_;
  int fd_ = -1;
  bool committed_ = false;
};

// Syncs the entries of a folder to disk. Throws Error.
void sync_folder(const std::filesystem::path& folder);

// A folder that disappears again if the work that it was made for fails.
class NewFolder {
 public:
  // Makes the folder and its missing parents. Throws Error.
  explicit NewFolder(const std::filesystem::path& path);
  // Removes the folders that the constructor made, as far as they are empty, unless keep() was called.
  ~NewFolder();
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  void keep() { made_.clear(); }

 private:
  std::vector<std::filesystem::path> made_;  // the deepest first
};

}  // namespace twobp
