// The contents and the format of a checkpoint's folder.
//
//   weights.safetensors    trained weights, under their names in Hugging Face's files
//   optimizer.safetensors  optimizer state, under the weight's name plus ".exp_avg" and so on
//   frozen.safetensors     weights that are not trained; only if there are any. They never change, so
//                          checkpoints of one run share the file (hard links).
//   state.json             step, data position, configuration, size and CRC-32 of each file, and its own
//                          CRC-32. Without it, there is no checkpoint.
//
// With many processes, each writes its own files: process 1 of 4 writes weights-00001-of-00004.safetensors. It holds
// the tensors that no earlier process has. A process without tensors of a kind writes no file of that kind. During the
// writing, part-00001-of-00004.json says that the files of process 1 are on disk, with their sizes and checksums.
//
// The random state is (train.seed, step): all random numbers are drawn from these.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "twobp/data/data.h"
#include "twobp/files/safetensors.h"
#include "twobp/train/config.h"
#include "twobp/train/trainer.h"
#include "twobp/train/variant.h"
#include "twobp/transport/world.h"

namespace twobp {

// Checks whether a run may resume from a checkpoint. Some settings must be the same so that the run continues to the
// bit. Some may be changed on purpose, and the rest do not matter.

// The facts that a checkpoint holds about the run that wrote it.
struct RunFacts {
  std::string config;   // JSON with every key; defaults that depend on other keys are filled in
  std::string data;     // fingerprint of the training data: the number of samples and a checksum of some
  std::string kernels;  // instruction set of our CPU kernels
  std::string order{};  // empty if the schedule keeps the order of micro-batches, otherwise its checksum
};

// Reads a few samples.
RunFacts facts_of_run(const Config& config, const Dataset& train, const Variant& variant = {});

// Throws Error that names the difference if one of these differs: the model, the data (the number of samples and a
// checksum of 16 of them; the files may have moved), the seed, the precision, the batch (of all data-parallel replicas
// together) or the type of optimizer. Everything that does not change a result may differ. So may optimizer.lr and the
// like, train.steps, threads, the CPU, and a schedule that gives up the order of micro-batches, but these give notes.
std::vector<std::string> check_same_run(const RunFacts& saved, const RunFacts& now);

inline constexpr int kCheckpointFormat = 3;  // 1: files of one process only, 2: no pieces of tensors
inline constexpr const char* kStateFile = "state.json";

// The data of a checkpoint in addition to its tensors.
struct CheckpointState {
  TrainingPosition position;
  int64_t optimizer_steps = 0;  // updates made; fewer than steps if some were skipped
  RunFacts run;
};

struct FileFacts {
  uint64_t bytes = 0;
  uint32_t crc = 0;

  bool operator==(const FileFacts&) const = default;
};
using FileList = std::map<std::string, FileFacts>;  // by name within the folder

enum class CheckpointFile : uint8_t { kWeights, kOptimizer, kFrozen };

// The owner of the files: process `process` of `count`.
struct CheckpointPart {
  int process = 0;
  int count = 1;
};

// A tensor's name in a file. With optimizer.shard, a replica may hold only some of a tensor's numbers, [begin, end) in
// the order of its indices: "model.norm.weight.exp_avg[4096:8192]".
struct PieceName {
  std::string name;
  int64_t begin = 0;
  int64_t end = -1;  // negative: it is the whole tensor

  bool whole() const { return end < 0; }
};
PieceName parse_piece(const std::string& stored);
std::string to_string(const PieceName& piece);

std::string checkpoint_file_name(CheckpointFile file, const CheckpointPart& part);
// Returns none if no tensor file of a checkpoint has that name.
std::optional<CheckpointFile> checkpoint_file_of(const std::string& name);
std::string part_file_name(const CheckpointPart& part);

// Reads the whole file. Throws Error that names the file.
FileFacts facts_of(const std::filesystem::path& path);
// CRC-32 of zlib and gzip, continued from `crc`.
uint32_t crc32_of(const void* data, size_t bytes, uint32_t crc = 0);

// state.json. The contents are untrusted: reading throws Error that names the file and says what is wrong with it.
void write_state(const std::filesystem::path& path, const CheckpointState& state, const FileList& files);
struct StateAndFiles {
  CheckpointState state;
  FileList files;
  int format = 0;
};
StateAndFiles read_state(const std::filesystem::path& path);

// A process's report about its part: its files, or the reason why it has none.
struct PartReport {
  int64_t step = 0;
  CheckpointPart part;
  FileList files;
  std::string error;
};
void write_part_report(const std::filesystem::path& path, const PartReport& report);
PartReport read_part_report(const std::filesystem::path& path);

}  // namespace twobp
