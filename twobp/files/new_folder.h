// A folder that disappears again if the work that it was made for fails.
#pragma once

#include <filesystem>
#include <vector>

namespace twobp {

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
