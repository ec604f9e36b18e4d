#include "twobp/train/checkpointer.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <utility>

#include "twobp/core/check.h"

namespace twobp {
namespace {

constexpr int kNice = 19;  // only what the ranks leave; if training waits, that is everything

// `first` tensors alone, as files have them: no live tensor is copied.
NamedTensors named(const std::vector<LiveTensor>& live, bool frozen) {
  NamedTensors tensors;
  for (const LiveTensor& one : live) {
    if (one.first && one.frozen == frozen) tensors.emplace_back(one.name, one.tensor);
  }
  return tensors;
}

// Into `copies`, each on its rank's thread: in parallel, and without a word to the memory meter, which counts
// what a step needs.
void copy_all(Pipeline& pipeline, const std::vector<LiveTensor>& live, NamedTensors& copies) {
  std::vector<const LiveTensor*> sources;
  for (const LiveTensor& one : live) {
    if (one.first && !one.frozen) sources.push_back(&one);
  }
  copies.resize(sources.size());
  pipeline.on_ranks([&](int rank) {
    for (size_t i = 0; i < sources.size(); ++i) {
      if (sources[i]->rank != rank) continue;
      auto& [name, copy] = copies[i];
      if (!copy.defined()) {
        name = sources[i]->name;
        copy = at::empty_like(sources[i]->tensor);
      }
      copy.copy_(sources[i]->tensor);
    }
  });
}

}  // namespace

Checkpointer::Checkpointer(const SaveConfig& save, bool resume)
    : save_(save), folder_(save.checkpoints, save.keep) {
  const std::vector<int64_t> steps = folder_.steps();
  TWOBP_CHECK(resume || steps.empty(), "save.checkpoints: ", folder_.path().string(),
              " holds checkpoints of a run, the newest of step ", steps.empty() ? 0 : steps.back(),
              ": go on with that run by --resume, or use another folder");
  thread_ = std::thread([this] { work(); });
}

Checkpointer::~Checkpointer() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

std::vector<std::string> Checkpointer::resume(Trainer& trainer) {
  std::vector<std::string> notes;
  const std::optional<Checkpoint> checkpoint = folder_.newest(notes);
  if (!checkpoint) return notes;
  const CheckpointState& state = checkpoint->state();
  run_ = facts_of_run(trainer.config(), *trainer.data().train, trainer.variant());
  for (std::string& note : check_same_run(state.run, run_)) notes.push_back(std::move(note));
  TWOBP_CHECK(state.position.step <= trainer.config().train.steps, "train.steps is ",
              trainer.config().train.steps, ", but the checkpoint ", checkpoint->folder().string(),
              " is of a later step");

  using File = Checkpoint::File;
  Update& update = trainer.update();
  const std::vector<LiveTensor> weights = update.live_weights();
  const std::vector<LiveTensor> optimizer = update.live_optimizer_state();
  checkpoint->check_tensors(File::kWeights, named(weights, false));
  checkpoint->check_tensors(File::kFrozen, named(weights, true));
  checkpoint->check_tensors(File::kOptimizer, named(optimizer, false));
  trainer.pipeline().on_ranks([&](int rank) {
    for (const LiveTensor& one : weights) {
      if (one.rank != rank) continue;
      one.tensor.copy_(checkpoint->read(one.frozen ? File::kFrozen : File::kWeights, one.name));
    }
    for (const LiveTensor& one : optimizer) {
      if (one.rank == rank) one.tensor.copy_(checkpoint->read(File::kOptimizer, one.name));
    }
    update.restored(rank, state.optimizer_steps);
  });
  trainer.go_on_from(state.position);
  last_step_ = state.position.step;
  return notes;
}

void Checkpointer::after_step(Trainer& trainer) {
  {
    const std::lock_guard lock(mutex_);
    if (error_) std::rethrow_exception(error_);
  }
  if (trainer.steps_done() % save_.every == 0) take(trainer);
}

void Checkpointer::finish(Trainer& trainer) {
  if (trainer.steps_done() > 0 && trainer.steps_done() != last_step_) take(trainer);
  wait();
}

void Checkpointer::take(Trainer& trainer) {
  wait();
  Update& update = trainer.update();
  const std::vector<LiveTensor> weights = update.live_weights();
  copy_all(trainer.pipeline(), weights, content_.weights);
  copy_all(trainer.pipeline(), update.live_optimizer_state(), content_.optimizer);
  content_.frozen = named(weights, true);  // nobody writes to these
  if (run_.config.empty()) run_ = facts_of_run(trainer.config(), *trainer.data().train, trainer.variant());
  content_.state = {trainer.position(), update.optimizer_steps(), run_};
  last_step_ = trainer.steps_done();
  {
    const std::lock_guard lock(mutex_);
    busy_ = true;
  }
  changed_.notify_all();
}

void Checkpointer::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !busy_; });
  if (error_) std::rethrow_exception(error_);
}

void Checkpointer::work() {
  ::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), kNice);  // of this thread, on Linux
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return busy_ || stop_; });
    if (!busy_) return;
    lock.unlock();
    std::exception_ptr error;
    try {
      folder_.add(content_);
    } catch (const std::exception& e) {
      error = std::make_exception_ptr(
          Error(concat("the checkpoint of step ", content_.state.position.step,
                       " could not be written, those before are as they were: ", e.what())));
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    error_ = error;
    busy_ = false;
    changed_.notify_all();
  }
}

}  // namespace twobp
