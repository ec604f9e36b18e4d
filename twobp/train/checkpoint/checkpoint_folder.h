// The folder of a run's checkpoints: step-00000100 and so on. A checkpoint is written under another name and renamed
// when all of it is on disk. The last few are kept. A folder with a checkpoint's name is whole, even if a process or
// the machine dies.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "twobp/train/checkpoint/checkpoint.h"
#include "twobp/train/checkpoint/checkpoint_format.h"

namespace twobp {

// Writes a checkpoint's folder. Every process writes its part. When the first process finds all parts, it adds
// state.json, which completes the checkpoint. Processes communicate only through the file system, because the
// background writer threads send no messages.

// The data that one process writes.
struct CheckpointContent {
  CheckpointState state;
  NamedTensors weights;
  NamedTensors optimizer;
  NamedTensors frozen;
};

// A file with the same frozen weights, in the first of these folders that (still) contains it.
struct FrozenFile {
  std::vector<std::filesystem::path> folders;
  FileFacts facts;
};

// Writes and syncs the process's files. If there are several parts, it then writes the part file. Makes the folder if
// no other process has. Returns the files. Throws Error (disk full, ...) that names the file; files written until then
// are kept.
FileList write_part(const std::filesystem::path& folder, const CheckpointContent& content,
                    const CheckpointPart& part = {}, const FrozenFile& frozen = {});

// Tries to tell the first process that this process cannot write its part.
void report_failed_part(const std::filesystem::path& folder, int64_t step, const CheckpointPart& part,
                        const std::string& error) noexcept;

struct PartsWait {
  double timeout = 300;                      // in seconds; restarts whenever bytes are added
  const std::atomic<bool>* hurry = nullptr;  // once true, a few seconds are enough
};

// For the first of `count` processes, after write_part. Waits for the others' parts, writes state.json and syncs the
// folder. `files` are its own. Throws Error if a part is missing, damaged or of another step, or if another process
// could not write its part.
void commit_parts(const std::filesystem::path& folder, const CheckpointState& state, int count, FileList files,
                  const PartsWait& wait = {});

class CheckpointFolder {
 public:
  // For the first process of a run. Makes the folder, locks it against other runs, and removes what killed writers
  // left. Throws Error if the folder cannot be made or written to, or is in use for `patience` seconds: a run that was
  // killed holds the lock until the last of its threads has ended.
  CheckpointFolder(const std::string& path, int64_t keep, int processes = 1, double patience = 5);
  // For another process. `run_id` is that of the first process. Throws Error if this is not the first process's folder,
  // for example because file systems are not shared. It may take until `patience` seconds later that this machine sees
  // what that process wrote.
  CheckpointFolder(const std::string& path, const CheckpointPart& part, const std::string& run_id, double patience = 5);
  ~CheckpointFolder();
  CheckpointFolder(const CheckpointFolder&) = delete;
  CheckpointFolder& operator=(const CheckpointFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  // Unique to this run, so that dying processes of an earlier run do not disturb it.
  const std::string& run_id() const { return run_id_; }
  // Steps of the existing checkpoints, ascending.
  std::vector<int64_t> steps() const;

  // The newest whole checkpoint, or none if there are no checkpoints. Adds a warning with the reason for each newer
  // checkpoint that is not whole. Throws Error if there are checkpoints but none is whole.
  std::optional<Checkpoint> newest(std::vector<std::string>& warnings);
  // Opens the checkpoint that the first process chose.
  Checkpoint open(int64_t step);

  // Adds this process's part, and calls `written` when it is on disk. The first process then waits for the other parts
  // and makes them a checkpoint. It removes checkpoints that are too old, and those of later steps (damaged ones that
  // newest() skipped). Throws Error that names the file; existing checkpoints are not changed.
  void add(const CheckpointContent& content, const PartsWait& wait = {},
           const std::function<void()>& written = nullptr);

 private:
  void lock(double patience);
  void clean();
  void write_run_id() const;
  std::filesystem::path of_step(int64_t step) const;
  // The temporary folder into which the run writes the step.
  std::filesystem::path aside_of(int64_t step) const;
  void remove(int64_t step);
  void take_frozen_of(const Checkpoint& checkpoint);
  void commit(const CheckpointContent& content, const FileList& files, const PartsWait& wait);

  std::filesystem::path path_;
  int64_t keep_ = 0;
  CheckpointPart part_;
  std::string run_id_;
  int lock_ = -1;
  FrozenFile frozen_;  // from a good checkpoint of this run
};

// Steps of the checkpoints in a folder, ascending. Throws Error if the folder cannot be listed.
std::vector<int64_t> checkpoint_steps(const std::filesystem::path& folder);
// Returns `folder` if it is a checkpoint's folder, and the newest checkpoint if it is a folder of checkpoints. Throws
// Error if it is neither.
std::filesystem::path find_checkpoint(const std::filesystem::path& folder);

}  // namespace twobp
