// Checkpoints of a training run, written in the background: tensors are copied between two steps, a thread of
// low priority puts them on the disk while training goes on. And back: a trainer set to where a checkpoint
// is.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "twobp/train/checkpoint_folder.h"
#include "twobp/train/trainer.h"

namespace twobp {

class Checkpointer {
 public:
  // `save.checkpoints`, made if need be. Throws Error: not writable, in use; there are checkpoints and
  // `resume` is not set (they would be mixed with those of another run).
  Checkpointer(const SaveConfig& save, bool resume);
  // Waits for what is being written.
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  // Sets a new trainer to where the newest whole checkpoint is; it then continues bitwise as if never
  // stopped, with any stages, schedule, p2 policy and memory cap. Returns what the user should know (damaged
  // checkpoints passed over, see also check_same_run). Without any checkpoint the trainer stays at step 0.
  // Throws Error: none is whole, or it is of another run.
  std::vector<std::string> resume(Trainer& trainer);

  // Call after every step: each save.every steps it copies the trainer's state, waiting first if the
  // checkpoint before is still being written. Throws what the writer ran into; training should stop then,
  // older checkpoints are whole.
  void after_step(Trainer& trainer);

  // At the end, also one that comes early: a checkpoint of the last step, on the disk when this returns.
  void finish(Trainer& trainer);

 private:
  void take(Trainer& trainer);
  void wait();
  void work();

  SaveConfig save_;
  CheckpointFolder folder_;
  CheckpointContent content_;  // copies, kept from one checkpoint to the next; the writer's while busy_
  RunFacts run_;
  int64_t last_step_ = -1;  // of the last copy, or of the checkpoint resumed from

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool busy_ = false;
  bool stop_ = false;
  std::exception_ptr error_;

  std::thread thread_;
};

}  // namespace twobp
