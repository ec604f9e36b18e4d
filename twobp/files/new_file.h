// A file that appears under its name only when all of it is on the disk, so that a run that is killed leaves
// the old one or none.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>

namespace twobp {

class NewFile {
 public:
  // Begins `path` with ".new" at its end. Every member throws Error: cannot create, write, sync or rename; a
  // folder of that name is in the way.
  explicit NewFile(std::filesystem::path path);
  // Removes what was written unless it was committed.
  ~NewFile();
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void write(const void* data, size_t bytes);
  void write(const std::string& text) { write(text.data(), text.size()); }
  // Puts it on the disk, still aside: of several files that belong together, all before the first commit, so
  // that a full disk changes none.
  void finish();
  // finish(), unless that is done; renames it and syncs the folder.
  void commit();

  const std::filesystem::path& path() const { return path_; }

 private:
  void check(bool ok, const char* what) const;

  std::filesystem::path path_;
  std::filesystem::path aside_;
  int fd_ = -1;
  bool committed_ = false;
};

// Puts the entries of a folder on the disk. Throws Error.
void sync_folder(const std::filesystem::path& folder);

}  // namespace twobp
