#include "twobp/train/checkpoint/checkpointer.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <set>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/train/checkpoint/checkpoint_folder.h"
#include "twobp/train/trainer.h"
#include "twobp/train/update/rank_update.h"
#include "twobp/train/update/update.h"

namespace twobp {
namespace {

using File = CheckpointFile;

constexpr int kNice = 19;  // uses only the time that ranks leave; if training waits, that is all of it
constexpr auto kLook = std::chrono::milliseconds(50);

File file_of(const LiveTensor& weight) {
  return weight.frozen ? File::kFrozen : File::kWeights;
}

// Each name once, as in the files. Live tensors are not copied.
NamedTensors named(const std::vector<LiveTensor>& live, bool frozen) {
  NamedTensors tensors;
  std::set<std::string> known;
  for (const LiveTensor& one : live) {
    if (one.frozen == frozen && known.insert(one.name).second) tensors.emplace_back(one.name, one.tensor);
  }
  return tensors;
}

// Copies into `copies`, each tensor on its rank's thread. This is parallel, and not reported to the memory meter, which
// counts what a step needs.
void copy_all(Pipeline& pipeline, const std::vector<const LiveTensor*>& sources, NamedTensors& copies) {
  copies.resize(sources.size());
  pipeline.on_ranks([&](int rank) {
    for (size_t i = 0; i < sources.size(); ++i) {
      if (sources[i]->rank != rank) continue;
      auto& [name, copy] = copies[i];
      if (!copy.defined()) {
        name = sources[i]->name;
        copy = at::empty_like(sources[i]->tensor, at::TensorOptions().device(at::kCPU));
      }
      copy.copy_(sources[i]->tensor);
    }
  });
}

std::vector<const LiveTensor*> chosen(const std::vector<LiveTensor>& live, const std::vector<bool>& writes,
                                      bool frozen) {
  std::vector<const LiveTensor*> sources;
  for (size_t i = 0; i < live.size(); ++i) {
    if (writes[i] && live[i].frozen == frozen) sources.push_back(&live[i]);
  }
  return sources;
}

}  // namespace

// The folder, the copies and the thread that writes them.
class Checkpointer::Writer {
 public:
  Writer(const SaveConfig& save, bool resume, const Processes& processes);
  ~Writer();
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  std::vector<std::string> resume(Trainer& trainer);
  void after_step(Trainer& trainer);
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

Checkpointer::Writer::Writer(const SaveConfig& save, bool resume, const Processes& processes)
    : save_(save), processes_(processes) {
  std::string run_id;
  processes.together([&] {
    if (!processes.is_first()) return;
    folder_.emplace(save.checkpoints, save.keep, processes.count());
    const std::vector<int64_t> steps = folder_->steps();
    TWOBP_CHECK(resume || steps.empty(), "save.checkpoints: ", folder_->path().string(),
                " holds checkpoints of a run, the newest of step ", steps.empty() ? 0 : steps.back(),
                ": continue that run with --resume, or use another folder");
    run_id = folder_->run_id();
  });
  run_id = processes.from_first(run_id);
  processes.together([&] {
    const CheckpointPart part{processes.index(), processes.count()};
    if (!processes.is_first()) folder_.emplace(save.checkpoints, part, run_id);
  });
  thread_ = std::thread([this] { work(); });
}

Checkpointer::Writer::~Writer() {
  hurry_ = true;
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

std::vector<std::string> Checkpointer::Writer::resume(Trainer& trainer) {
  // All processes must use the same checkpoint. The first process reads every file, the others those that they need.
  std::vector<std::string> notes;
  std::optional<Checkpoint> checkpoint;
  std::string step;
  processes_.together([&] {
    if (processes_.is_first()) checkpoint = folder_->newest(notes);
    if (checkpoint) step = std::to_string(checkpoint->state().position.step);
  });
  step = processes_.from_first(step);
  if (step.empty()) return notes;
  processes_.together([&] {
    if (!checkpoint) checkpoint = folder_->open(std::stoll(step));
    const CheckpointState& state = checkpoint->state();
    run_ = facts_of_run(trainer.config(), *trainer.data().train, trainer.variant());
    for (std::string& note : check_same_run(state.run, run_)) notes.push_back(std::move(note));
    TWOBP_CHECK(state.position.step <= trainer.config().train.steps, "train.steps is ", trainer.config().train.steps,
                ", but the checkpoint ", checkpoint->folder().string(), " is of a later step, ", state.position.step,
                ": raise train.steps");
  });
  set_to(trainer, *checkpoint);
  if (!processes_.is_first()) notes.clear();
  return notes;
}

void Checkpointer::Writer::set_to(Trainer& trainer, const Checkpoint& checkpoint) {
  Update& update = trainer.update();
  const std::vector<LiveTensor> weights = update.live_weights();
  const std::vector<LiveTensor> optimizer = update.live_optimizer_state();
  std::string names;  // "0model.norm.weight": the kind of file, and the name
  const std::vector<std::pair<File, NamedTensors>> all = {{File::kWeights, named(weights, false)},
                                                          {File::kFrozen, named(weights, true)},
                                                          {File::kOptimizer, named(optimizer, false)}};
  processes_.together([&] {
    for (const auto& [file, tensors] : all) {
      checkpoint.check_tensors(file, tensors);
      for (const auto& [name, tensor] : tensors) names += concat(static_cast<int>(file), name, '\n');
    }
  });
  const std::vector<std::string> everyones = processes_.to_first(names);
  processes_.together([&] {
    std::map<File, std::set<std::string>> known;
    for (const std::string& text : everyones) {
      for (const std::string& name : split(text, '\n')) {
        if (!name.empty()) known[static_cast<File>(name[0] - '0')].insert(name.substr(1));
      }
    }
    if (!processes_.is_first()) return;
    for (const auto& [file, tensors] : all) checkpoint.check_no_others(file, known[file]);
  });
  processes_.together([&] {
    trainer.pipeline().on_ranks([&](int rank) {
      for (const LiveTensor& one : weights) {
        if (one.rank == rank) one.tensor.copy_(checkpoint.read(file_of(one), one.name));
      }
      for (const LiveTensor& one : optimizer) {
        if (one.rank == rank) one.tensor.copy_(checkpoint.read(File::kOptimizer, one.name).view(one.tensor.sizes()));
      }
      update.restored(rank, checkpoint.state().optimizer_steps);
    });
  });
  trainer.go_on_from(checkpoint.state().position);
  last_step_ = checkpoint.state().position.step;
}

void Checkpointer::Writer::after_step(Trainer& trainer) {
  {
    const std::lock_guard lock(mutex_);
    check_error();
  }
  if (trainer.steps_done() % save_.every == 0) take(trainer);
}

void Checkpointer::Writer::finish(Trainer& trainer) {
  if (trainer.steps_done() > 0 && trainer.steps_done() != last_step_) take(trainer);
  wait_for_all();
}

void Checkpointer::Writer::wait_for_all() {
  // Waits for the parts first: if a process cannot write its part, that is known before the others wait for it.
  processes_.together([&] { wait(Phase::kOthers); });
  processes_.together([&] { wait(Phase::kIdle); });
}

void Checkpointer::Writer::choose_tensors(const std::vector<LiveTensor>& weights,
                                          const std::vector<LiveTensor>& optimizer) {
  std::vector<std::string> names;
  for (const auto* live : {&weights, &optimizer}) {
    for (const LiveTensor& one : *live) names.push_back(one.name);
  }
  const std::vector<bool> mine = processes_.writes(names);
  std::set<std::string> known;  // two ranks of this process may have the same name
  std::vector<bool> writes;
  for (size_t i = 0; i < names.size(); ++i) writes.push_back(mine[i] && known.insert(names[i]).second);
  const auto middle = writes.begin() + static_cast<ptrdiff_t>(weights.size());
  writes_weights_.assign(writes.begin(), middle);
  writes_optimizer_.assign(middle, writes.end());
  chosen_ = true;
}

void Checkpointer::Writer::take(Trainer& trainer) {
  wait_for_all();
  Update& update = trainer.update();
  const std::vector<LiveTensor> weights = update.live_weights();
  const std::vector<LiveTensor> optimizer = update.live_optimizer_state();
  if (!chosen_) choose_tensors(weights, optimizer);
  copy_all(trainer.pipeline(), chosen(weights, writes_weights_, false), content_.weights);
  copy_all(trainer.pipeline(), chosen(optimizer, writes_optimizer_, false), content_.optimizer);
  content_.frozen.clear();
  for (const LiveTensor* one : chosen(weights, writes_weights_, true)) {
    content_.frozen.emplace_back(one->name, one->tensor);  // frozen weights never change
  }
  if (run_.config.empty()) run_ = facts_of_run(trainer.config(), *trainer.data().train, trainer.variant());
  content_.state = {trainer.position(), update.optimizer_steps(), run_};
  last_step_ = trainer.steps_done();
  {
    const std::lock_guard lock(mutex_);
    phase_ = Phase::kPart;
  }
  changed_.notify_all();
}

void Checkpointer::Writer::check_error() {
  if (error_) std::rethrow_exception(error_);
}

void Checkpointer::Writer::wait(Phase phase) {
  std::unique_lock lock(mutex_);
  const auto reached = [&] { return phase_ == Phase::kIdle || (phase == Phase::kOthers && phase_ == Phase::kOthers); };
  // A process that dies leaves no part, so the others need not wait for it.
  while (!changed_.wait_for(lock, kLook, reached)) processes_.throw_if_aborted();
  check_error();
}

void Checkpointer::Writer::work() {
  ::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), kNice);  // of this thread, on Linux
  const PartsWait others{processes_.timeout(), &hurry_};
  const auto enter = [this](Phase phase, const std::exception_ptr& error = nullptr) {
    const std::lock_guard lock(mutex_);
    phase_ = phase;
    if (error) error_ = error;
    changed_.notify_all();
  };
  while (true) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return phase_ == Phase::kPart || stop_; });
      if (phase_ != Phase::kPart) return;
    }
    std::exception_ptr error;
    try {
      folder_->add(content_, others, [&] { enter(Phase::kOthers); });
    } catch (const std::exception& e) {
      error = std::make_exception_ptr(Error(concat("the checkpoint of step ", content_.state.position.step,
                                                   " could not be written, earlier ones are unchanged: ", e.what())));
    } catch (...) {
      error = std::current_exception();
    }
    enter(Phase::kIdle, error);
  }
}

Checkpointer::Checkpointer(const SaveConfig& save, bool resume, const Processes& processes)
    : writer_(std::make_unique<Writer>(save, resume, processes)) {}

Checkpointer::~Checkpointer() = default;

std::vector<std::string> Checkpointer::resume(Trainer& trainer) {
  return writer_->resume(trainer);
}

void Checkpointer::after_step(Trainer& trainer) {
  writer_->after_step(trainer);
}

void Checkpointer::finish(Trainer& trainer) {
  writer_->finish(trainer);
}

}  // namespace twobp
