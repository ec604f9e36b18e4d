// A checkpoint as something else: a Hugging Face directory with its weights, or a checkpoint of another
// number of files.
#pragma once

#include <string>

#include "twobp/train/checkpoint/checkpoint.h"
#include "twobp/train/config.h"
#include "twobp/train/weights/save_model.h"

namespace twobp {

// What save_model writes at the end of the run that `checkpoint` is of. `config`: that run's. Tensors are
// read from the mapped files as they are written. Throws Error: the checkpoint has not exactly the weights of
// the configuration's model, the model cannot be saved, the folder cannot be written to.
void save_model_of(const Checkpoint& checkpoint, const Config& config, const std::string& directory,
                   const SaveModelOptions& options = {});

// The same checkpoint in `directory`/step-..., as `parts` processes would have written it, with about the
// same number of bytes each; any number of processes can go on from it. Throws Error: the folder holds
// checkpoints, cannot be written to.
void reshard(const Checkpoint& checkpoint, const std::string& directory, int parts);

}  // namespace twobp
