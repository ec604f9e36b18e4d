// One checkpoint on the disk: a folder with all that a run needs to go on as if it had never stopped.
//
//   weights.safetensors    trained weights, under their names in Hugging Face's files
//   optimizer.safetensors  optimizer state, the weight's name with ".exp_avg" and so on behind it
//   frozen.safetensors     weights that are not trained; only if there are any. They never change, so that
//                          checkpoints of one run share the file (hard links)
//   state.json             step, data position, configuration, size and CRC-32 of each file, and its own
//   CRC-32
//
// The random state is (train.seed, step): all that is random is drawn from these.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>

#include <ATen/ATen.h>

#include "twobp/train/position.h"
#include "twobp/train/safetensors.h"
#include "twobp/train/same_run.h"

namespace twobp {

// What a checkpoint says beside its tensors.
struct CheckpointState {
  TrainingPosition position;
  int64_t optimizer_steps = 0;  // updates made: fewer than steps where some were skipped
  RunFacts run;
};

struct CheckpointContent {
  CheckpointState state;
  NamedTensors weights;
  NamedTensors optimizer;
  NamedTensors frozen;
};

// Writes a new folder and syncs it. `frozen_from`: a checkpoint folder with the same frozen weights, or
// empty. Throws Error (exists, disk full, ...), naming the file; what is there by then stays.
void write_checkpoint(const std::filesystem::path& folder, const CheckpointContent& content,
                      const std::filesystem::path& frozen_from);

// A checkpoint opened for reading. The folder is untrusted: files that are missing, truncated or changed are
// found before anything is used.
class Checkpoint {
 public:
  // Reads every file once. Throws Error naming the file and what is wrong with it.
  explicit Checkpoint(std::filesystem::path folder);
  ~Checkpoint();
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;

  const std::filesystem::path& folder() const { return folder_; }
  const CheckpointState& state() const { return state_; }

  enum class File : uint8_t { kWeights, kOptimizer, kFrozen };
  // The tensors must be the named ones in number, name, shape and dtype; Error names the first that is not.
  // Call before `read`.
  void check_tensors(File file, const NamedTensors& expected) const;
  // The file's tensor: mapped memory that lives as long as this object.
  at::Tensor read(File file, const std::string& name) const;

 private:
  std::filesystem::path folder_;
  CheckpointState state_;
  std::map<File, std::unique_ptr<SafetensorsFile>> files_;
};

// CRC-32 of zlib and gzip, going on from `crc`.
uint32_t crc32_of(const void* data, size_t bytes, uint32_t crc = 0);

}  // namespace twobp
