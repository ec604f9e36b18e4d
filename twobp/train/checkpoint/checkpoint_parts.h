// Writing a checkpoint's folder: every process puts its part there, and the first, when it finds all of them,
// adds state.json, which makes it a checkpoint. Processes meet in the file system alone: threads that write
// in the background send nothing.
#pragma once

#include <atomic>
#include <filesystem>
#include <vector>

#include "twobp/train/checkpoint/checkpoint_format.h"

namespace twobp {

// Of a process: what it writes.
struct CheckpointContent {
  CheckpointState state;
  NamedTensors weights;
  NamedTensors optimizer;
  NamedTensors frozen;
};

// A file with the same frozen weights, in the first of these folders that (still) has it.
struct FrozenFile {
  std::vector<std::filesystem::path> folders;
  FileFacts facts;
};

// Writes the process's files, syncs them, and, where there are several parts, says so in its part file; the
// folder is made if another process has not. Returns its files. Throws Error (disk full, ...), naming the
// file; what is there by then stays.
FileList write_part(const std::filesystem::path& folder, const CheckpointContent& content,
                    const CheckpointPart& part = {}, const FrozenFile& frozen = {});

// Leaves word for the first process that this one's part cannot be written, if even that can be.
void report_failed_part(const std::filesystem::path& folder, int64_t step, const CheckpointPart& part,
                        const std::string& error) noexcept;

struct PartsWait {
  double timeout = 300;                      // seconds in which no byte was added
  const std::atomic<bool>* hurry = nullptr;  // once true: seconds are enough
};

// For the first of `count` processes, after write_part: waits for the others' parts, writes state.json and
// syncs the folder. `files`: its own. Throws Error: a part is missing, damaged, or of another step; another
// process could not write its.
void commit_parts(const std::filesystem::path& folder, const CheckpointState& state, int count,
                  FileList files, const PartsWait& wait = {});

// The folder of a run of one process, which must be new.
void write_checkpoint(const std::filesystem::path& folder, const CheckpointContent& content);

}  // namespace twobp
