// What lies in a checkpoint's folder, and how it is written down.
//
//   weights.safetensors    trained weights, under their names in Hugging Face's files
//   optimizer.safetensors  optimizer state, the weight's name with ".exp_avg" and so on behind it
//   frozen.safetensors     weights that are not trained; only if there are any. They never change, so that
//                          checkpoints of one run share the file (hard links)
//   state.json             step, data position, configuration, size and CRC-32 of each file, and its own
//                          CRC-32: without it, there is no checkpoint
//
// Of a run of many processes each writes files of its own, weights-00001-of-00004.safetensors by process 1 of
// 4, with what no process before it has; one that has nothing of a kind writes none. While they are written,
// part-00001-of-00004.json says that process 1's are on the disk, and their sizes and checksums.
//
// The random state is (train.seed, step): all that is random is drawn from these.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include <ATen/ATen.h>

#include "twobp/files/safetensors.h"
#include "twobp/train/checkpoint/position.h"
#include "twobp/train/checkpoint/same_run.h"
#include "twobp/transport/world.h"

namespace twobp {

inline constexpr int kCheckpointFormat = 2;  // 1: the files of one process alone
inline constexpr const char* kStateFile = "state.json";

// What a checkpoint says beside its tensors.
struct CheckpointState {
  TrainingPosition position;
  int64_t optimizer_steps = 0;  // updates made: fewer than steps where some were skipped
  RunFacts run;
};

struct FileFacts {
  uint64_t bytes = 0;
  uint32_t crc = 0;

  bool operator==(const FileFacts&) const = default;
};
using FileList = std::map<std::string, FileFacts>;  // by name in the folder

enum class CheckpointFile : uint8_t { kWeights, kOptimizer, kFrozen };

// Whose files: process `process` of `count`.
struct CheckpointPart {
  int process = 0;
  int count = 1;
};

std::string checkpoint_file_name(CheckpointFile file, const CheckpointPart& part);
// None: no file of a checkpoint's tensors is called that.
std::optional<CheckpointFile> checkpoint_file_of(const std::string& name);
std::string part_file_name(const CheckpointPart& part);

// Reads all of it. Throws Error naming the file.
FileFacts facts_of(const std::filesystem::path& path);
// CRC-32 of zlib and gzip, going on from `crc`.
uint32_t crc32_of(const void* data, size_t bytes, uint32_t crc = 0);

// state.json. What is read is untrusted: Error naming the file and what is wrong with it.
void write_state(const std::filesystem::path& path, const CheckpointState& state, const FileList& files);
struct StateAndFiles {
  CheckpointState state;
  FileList files;
  int format = 0;
};
StateAndFiles read_state(const std::filesystem::path& path);

// What a process says of its part: its files, or why there are none.
struct PartReport {
  int64_t step = 0;
  CheckpointPart part;
  FileList files;
  std::string error;
};
void write_part_report(const std::filesystem::path& path, const PartReport& report);
PartReport read_part_report(const std::filesystem::path& path);

}  // namespace twobp
