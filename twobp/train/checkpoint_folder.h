// The folder with a run's checkpoints, step-00000100 and so on: written aside and renamed when all of it is
// on the disk, the last few kept. Whenever the process or the machine dies, what is under a checkpoint's name
// is whole.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "twobp/train/checkpoint.h"

namespace twobp {

class CheckpointFolder {
 public:
  // Makes the folder, locks it against other processes, removes what killed writers left. Throws Error:
  // cannot be made or written to, in use.
  CheckpointFolder(const std::string& path, int64_t keep);
  ~CheckpointFolder();
  CheckpointFolder(const CheckpointFolder&) = delete;
  CheckpointFolder& operator=(const CheckpointFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  // Steps of the checkpoints there, ascending.
  std::vector<int64_t> steps() const;

  // The newest that is whole; none if there are no checkpoints. For each newer one that is not, a warning
  // that says why. Throws Error if there are checkpoints but none is whole.
  std::optional<Checkpoint> newest(std::vector<std::string>& warnings);

  // Adds a checkpoint, and when it is on the disk removes those that are too old, and those of later steps
  // (damaged ones that newest() passed over). Throws Error naming the file; the ones there stay as they were.
  void add(const CheckpointContent& content);

 private:
  std::filesystem::path of_step(int64_t step) const;
  void remove(int64_t step);

  std::filesystem::path path_;
  int64_t keep_;
  int lock_ = -1;
  std::filesystem::path frozen_from_;  // a good checkpoint of this run
};

}  // namespace twobp
