// Converts a checkpoint to a Hugging Face directory with its weights, or to a checkpoint with another number of files.
#pragma once

#include <string>

#include "twobp/train/checkpoint/checkpoint.h"
#include "twobp/train/config.h"
#include "twobp/train/weights/save_model.h"

namespace twobp {

// Writes what save_model would write at the end of the checkpoint's run. `config` is the configuration of that run. All
// weights are in memory meanwhile. Throws Error if the checkpoint's weights are not exactly those of the
// configuration's model, the model cannot be saved, or the folder cannot be written to.
void save_model_of(const Checkpoint& checkpoint, const Config& config, const std::string& directory,
                   const SaveModelOptions& options = {});

// Writes the same checkpoint to `directory`/step-..., as `parts` processes with about equal numbers of bytes would have
// written it. One part at a time is in memory. Any number of processes can resume from it. Throws Error if the folder
// holds checkpoints or cannot be written to.
void reshard(const Checkpoint& checkpoint, const std::string& directory, int parts);

}  // namespace twobp
