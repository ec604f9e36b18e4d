// Writes checkpoints of a training run in the background. Tensors are copied between two steps, and a thread
// of low priority writes them to disk while training continues. Also sets a trainer to a checkpoint's
// position. In a run of many processes, each has a Checkpointer, and all call the same members after the same
// steps.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "twobp/train/checkpoint/checkpoint_folder.h"
#include "twobp/train/processes.h"
#include "twobp/train/trainer.h"
#include "twobp/train/update/savepoint.h"
#include "twobp/train/update/update.h"

namespace twobp {

class Checkpointer {
 public:
  // Makes the folder `save.checkpoints` if needed. Throws Error if it is not writable, is in use, or is not
  // the same folder for all processes. Also throws Error if it has checkpoints and `resume` is not set,
  // because they would be mixed with those of another run. This and every other member throws Aborted if
  // another process has failed.
  Checkpointer(const SaveConfig& save, bool resume, const Processes& processes = {});
  // Waits for the current write, but only a few seconds for other processes' parts.
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  // Sets a new trainer to the newest whole checkpoint. The run then continues bitwise as if it had never
  // stopped, with any stages, processes, schedule, p2 policy and memory cap. On the first process, returns
  // notes for the user (damaged checkpoints skipped; see also check_same_run). Without any checkpoint the
  // trainer stays at step 0. Throws Error if no checkpoint is whole, or if it is of another run.
  std::vector<std::string> resume(Trainer& trainer);

  // Call this after every step. Every save.every steps it copies the trainer's state; if the previous
  // checkpoint is still being written, it waits first. Throws the writer's errors. Training should then stop;
  // older checkpoints are whole.
  void after_step(Trainer& trainer);

  // Call this at the end, also if training stops early. Makes a checkpoint of the last step, which is on disk
  // when this returns.
  void finish(Trainer& trainer);

 private:
  enum class Phase : uint8_t {
    kIdle,
    kPart,   // writing this process's part
    kOthers  // waiting for the others' parts
  };

  void set_to(Trainer& trainer, const Checkpoint& checkpoint);
  void choose_tensors(const std::vector<LiveTensor>& weights, const std::vector<LiveTensor>& optimizer);
  // Waits until the current checkpoint is whole on every process.
  void wait_for_all();
  void take(Trainer& trainer);
  void check_error();
  // Waits until the writer has reached `phase`, or passed it.
  void wait(Phase phase);
  void work();

  SaveConfig save_;
  Processes processes_;
  std::optional<CheckpointFolder> folder_;
  // The live tensors that this process writes. All processes choose together, before the first checkpoint.
  bool chosen_ = false;
  std::vector<bool> writes_weights_;
  std::vector<bool> writes_optimizer_;
  // Copies, kept from one checkpoint to the next. The writer owns them while it is not idle.
  CheckpointContent content_;
  RunFacts run_;
  int64_t last_step_ = -1;  // step of the last copy, or of the checkpoint resumed from

  std::atomic<bool> hurry_{false};
  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  Phase phase_ = Phase::kIdle;
  bool stop_ = false;
  std::exception_ptr error_;

  std::thread thread_;
};

}  // namespace twobp
