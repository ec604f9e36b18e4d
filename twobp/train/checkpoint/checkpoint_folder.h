// The folder with a run's checkpoints, step-00000100 and so on: written aside and renamed when all of it is
// on the disk, the last few kept. Whenever a process or the machine dies, what is under a checkpoint's name
// is whole.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "twobp/train/checkpoint/checkpoint.h"
#include "twobp/train/checkpoint/checkpoint_parts.h"

namespace twobp {

class CheckpointFolder {
 public:
  // For the first of a run's processes: makes the folder, locks it against other runs, removes what killed
  // writers left. Throws Error: cannot be made or written to, in use.
  CheckpointFolder(const std::string& path, int64_t keep, int processes = 1);
  // For another one. `run_id`: the first's. Throws Error: it is not the folder of that process, as where file
  // systems are not shared.
  CheckpointFolder(const std::string& path, const CheckpointPart& part, const std::string& run_id);
  ~CheckpointFolder();
  CheckpointFolder(const CheckpointFolder&) = delete;
  CheckpointFolder& operator=(const CheckpointFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  // No other run has it, so that one whose last processes are still dying is not in this one's way.
  const std::string& run_id() const { return run_id_; }
  // Steps of the checkpoints there, ascending.
  std::vector<int64_t> steps() const;

  // The newest that is whole; none if there are no checkpoints. For each newer one that is not, a warning
  // that says why. Throws Error if there are checkpoints but none is whole.
  std::optional<Checkpoint> newest(std::vector<std::string>& warnings);
  // The one that the first process chose.
  Checkpoint open(int64_t step);

  // Adds this process's part; calls `written` when it is on the disk. The first process then waits for the
  // other parts, makes them a checkpoint, and removes those that are too old, and those of later steps
  // (damaged ones that newest() passed over). Throws Error naming the file; the ones there stay as they were.
  void add(const CheckpointContent& content, const PartsWait& wait = {},
           const std::function<void()>& written = nullptr);

 private:
  void lock();
  void clean();
  void write_run_id() const;
  std::filesystem::path of_step(int64_t step) const;
  // Where the run writes it.
  std::filesystem::path aside_of(int64_t step) const;
  void remove(int64_t step);
  void take_frozen_of(const Checkpoint& checkpoint);
  void commit(const CheckpointContent& content, const FileList& files, const PartsWait& wait);

  std::filesystem::path path_;
  int64_t keep_ = 0;
  CheckpointPart part_;
  std::string run_id_;
  int lock_ = -1;
  FrozenFile frozen_;  // of a good checkpoint of this run
};

// Steps of the checkpoints in a folder, ascending. Throws Error: cannot be listed.
std::vector<int64_t> checkpoint_steps(const std::filesystem::path& folder);
// Of a checkpoint's folder that folder, of a folder of checkpoints its newest one's. Throws Error: neither.
std::filesystem::path find_checkpoint(const std::filesystem::path& folder);

}  // namespace twobp
