// Writes a checkpoint's folder. Every process writes its part. When the first process finds all parts, it adds
// state.json, which completes the checkpoint. Processes communicate only through the file system, because the
// background writer threads send no messages.
#pragma once

#include <atomic>
#include <filesystem>
#include <vector>

#include "twobp/train/checkpoint/checkpoint_format.h"

namespace twobp {

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

}  // namespace twobp
