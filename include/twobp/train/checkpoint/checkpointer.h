// Writes checkpoints of a training run in the background. Tensors are copied between two steps, and a thread of low
// priority writes them to disk while training continues. Also sets a trainer to a checkpoint's position. In a run of
// many processes, each has a Checkpointer, and all call the same members after the same steps.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "twobp/train/config.h"
#include "twobp/transport/processes.h"

namespace twobp {

class Trainer;

class Checkpointer {
 public:
  // Makes the folder `save.checkpoints` if needed. Throws Error if it is not writable, is in use, or is not the same
  // folder for all processes. Also throws Error if it has checkpoints and `resume` is not set, because they would be
  // mixed with those of another run. This and every other member throws Aborted if another process has failed.
  Checkpointer(const SaveConfig& save, bool resume, const Processes& processes = {});
  // Waits for the current write, but only a few seconds for other processes' parts.
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  // Sets a new trainer to the newest whole checkpoint. The run then continues bitwise as if it had never stopped, with
  // any stages, processes, schedule, p2 policy and memory cap. On the first process, returns notes for the user
  // (damaged checkpoints skipped; see also check_same_run). Without any checkpoint the trainer stays at step 0. Throws
  // Error if no checkpoint is whole, or if it is of another run.
  std::vector<std::string> resume(Trainer& trainer);

  // Call this after every step. Every save.every steps it copies the trainer's state; if the previous checkpoint is
  // still being written, it waits first. Throws the writer's errors. Training should then stop; older checkpoints are
  // whole.
  void after_step(Trainer& trainer);

  // Call this at the end, also if training stops early. Makes a checkpoint of the last step, which is on disk when this
  // returns.
  void finish(Trainer& trainer);

 private:
  class Writer;
  std::unique_ptr<Writer> writer_;
};

}  // namespace twobp
