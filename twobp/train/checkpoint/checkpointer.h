// Checkpoints of a training run, written in the background: tensors are copied between two steps, a thread of
// low priority puts them on the disk while training goes on. And back: a trainer set to where a checkpoint
// is. Of a run of many processes, each has a Checkpointer; all call the same members after the same steps.
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
  // `save.checkpoints`, made if need be. Throws Error: not writable, in use; there are checkpoints and
  // `resume` is not set (they would be mixed with those of another run); not the same folder for all
  // processes. This and every other member throws Aborted where it is another process that has failed.
  Checkpointer(const SaveConfig& save, bool resume, const Processes& processes = {});
  // Waits for what is being written; of other processes' parts only seconds.
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  // Sets a new trainer to where the newest whole checkpoint is; it then continues bitwise as if never
  // stopped, with any stages, processes, schedule, p2 policy and memory cap. Returns, on the first process,
  // what the user should know (damaged checkpoints passed over, see also check_same_run). Without any
  // checkpoint the trainer stays at step 0. Throws Error: none is whole, or it is of another run.
  std::vector<std::string> resume(Trainer& trainer);

  // Call after every step: each save.every steps it copies the trainer's state, waiting first if the
  // checkpoint before is still being written. Throws what the writer ran into; training should stop then,
  // older checkpoints are whole.
  void after_step(Trainer& trainer);

  // At the end, also one that comes early: a checkpoint of the last step, all of it on the disk when this
  // returns.
  void finish(Trainer& trainer);

 private:
  enum class Phase : uint8_t {
    kIdle,
    kPart,
    kOthers
  };  // writing this process's part; waiting for the others'

  void set_to(Trainer& trainer, const Checkpoint& checkpoint);
  void choose_tensors(const std::vector<LiveTensor>& weights, const std::vector<LiveTensor>& optimizer);
  // Until the checkpoint that is being written is whole, on every process.
  void wait_for_all();
  void take(Trainer& trainer);
  void check_error();
  // Until the writer is as far as that, or further.
  void wait(Phase phase);
  void work();

  SaveConfig save_;
  Processes processes_;
  std::optional<CheckpointFolder> folder_;
  // Which live tensors this process writes. Chosen before the first checkpoint, by all processes at once.
  bool chosen_ = false;
  std::vector<bool> writes_weights_;
  std::vector<bool> writes_optimizer_;
  CheckpointContent
      content_;  // copies, kept from one checkpoint to the next; the writer's while it is not idle
  RunFacts run_;
  int64_t last_step_ = -1;  // of the last copy, or of the checkpoint resumed from

  std::atomic<bool> hurry_{false};
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  Phase phase_ = Phase::kIdle;
  bool stop_ = false;
  std::exception_ptr error_;

  std::thread thread_;
};

}  // namespace twobp
