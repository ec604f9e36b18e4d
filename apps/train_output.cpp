#include "apps/train_output.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <unistd.h>
#include <utility>

#include "apps/print.h"
#include "apps/run_guard.h"
#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/files/new_file.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/train/variant.h"

namespace twobp {
namespace {

constexpr size_t kRecent = 20;

}  // namespace

Progress::Progress(int64_t total_steps, int64_t log_every, std::string_view items)
    : total_(total_steps), log_every_(log_every), items_(items), terminal_(is_terminal(STDOUT_FILENO)) {}

void Progress::show(const StepResult& result) {
  recent_.push_back(result.report.seconds() + (result.report.begun_early ? 0 : result.input_wait));
  if (recent_.size() > kRecent) recent_.pop_front();
  const double mean = std::accumulate(recent_.begin(), recent_.end(), 0.0) / static_cast<double>(recent_.size());
  const bool last = result.step == total_;
  if (!terminal_ && !last && result.step % log_every_ != 0 && result.step != 1) return;
  std::string memory;
  for (const MemoryUse& use : result.report.rank_memory) {
    memory += (memory.empty() ? "" : " | ") + format_bytes(static_cast<double>(use.peak));
  }
  const std::string idle =
      result.report.timed() ? concat("  idle ", fixed(100 * result.report.mean_idle(), 1), '%') : "";
  if (terminal_) print_as_is("\r\033[K");
  print("step %lld/%lld  loss %.4f%s  %.0f %s/s  left %s%s  memory %s%s", static_cast<long long>(result.step),
        static_cast<long long>(total_), result.loss, result.skipped ? " (skipped)" : "",
        static_cast<double>(result.tokens) / mean, items_.c_str(),
        format_seconds(mean * static_cast<double>(total_ - result.step)).c_str(), idle.c_str(), memory.c_str(),
        terminal_ ? "" : "\n");
  line_open_ = terminal_;
}

void Progress::finish_line() {
  if (line_open_) print("\n");
  line_open_ = false;
}

MetricsFile::MetricsFile(std::string path) : path_(std::move(path)) {
  if (!path_.empty()) open();
}

MetricsFile::~MetricsFile() {
  close();
}

void MetricsFile::open() {
  fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);  // waits for a pipe's reader
  if (fd_ < 0) fail_to_write();
  ::fcntl(fd_, F_SETFL, ::fcntl(fd_, F_GETFL) | O_NONBLOCK);  // write() waits itself
}

void MetricsFile::close() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

void MetricsFile::fail_to_write() const {
  fail("cannot write ", path_, ": ", std::strerror(errno));
}

void MetricsFile::clear() {
  // A pipe or a device has no length.
  if (!path_.empty() && ::ftruncate(fd_, 0) != 0 && errno != EINVAL) fail_to_write();
}

void MetricsFile::keep_until(int64_t step) {
  if (path_.empty() || !std::filesystem::is_regular_file(path_)) return;
  close();
  {
    std::ifstream old(path_);
    NewFile kept(path_);
    for (std::string line; std::getline(old, line);) {
      const nlohmann::json value = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
      if (!value.is_object() || !value.contains("step") || !value["step"].is_number_integer()) continue;
      if (value["step"].get<int64_t>() > step) continue;
      line += '\n';
      kept.write(line.data(), line.size());
    }
    kept.commit();
  }
  open();
}

void MetricsFile::write(const nlohmann::json& line) {
  if (path_.empty()) return;
  const std::string text = line.dump() + '\n';
  for (size_t done = 0; done < text.size();) {
    if (!wait_writable(fd_)) return;
    const ssize_t written = ::write(fd_, text.data() + done, text.size() - done);
    if (written >= 0) {
      done += static_cast<size_t>(written);
    } else if (errno != EAGAIN && errno != EINTR) {
      if (errno == EPIPE && stop_signal() != 0) return;
      fail_to_write();
    }
  }
}

TraceOutput::TraceOutput(const TraceOptions& options, Trainer& trainer) : options_(options), trainer_(&trainer) {
  if (options.file.empty()) {
    TWOBP_CHECK(options.steps.empty(), "--trace-steps needs --trace FILE");
    return;
  }
  if (trainer.steps_done() >= trainer.config().train.steps) return;  // a resumed run that was already done
  steps_ = choose_trace_steps(options.steps, {trainer.steps_done() + 1, trainer.config().train.steps});
  if (trainer.world().is_first()) {  // a missing folder is reported before hours of training, not after
    const std::ofstream file(options.file, std::ios::app);
    TWOBP_CHECK(file.good(), "cannot write ", options.file, ": ", std::strerror(errno));
  }
  recorder_ = std::make_shared<TraceRecorder>(steps_);
  trainer.add_observer(recorder_);
}

void TraceOutput::after_step() {
  if (recorder_ && !written_ && trainer_->world().is_first() && recorder_->complete()) write();
}

void TraceOutput::finish() {
  if (!recorder_ || !trainer_->world().is_first()) return;
  const auto& reports = recorder_->reports();
  if (reports.empty()) {
    log_warning(concat("nothing traced: the run ended before step ", steps_.first));
    return;
  }
  if (!written_) write();
  print("steps %lld to %lld are recorded in %s\n", static_cast<long long>(reports.front().step),
        static_cast<long long>(reports.back().step), options_.file.c_str());
}

void TraceOutput::write() {
  const Variant& variant = trainer_->variant();
  Trace trace;
  trace.title = concat(trainer_->config().model.type.name(), " on ", trainer_->pipeline().stages(), " stages, ",
                       variant.schedule, " with p2 ", policy_name(variant.policy));
  trace.steps = recorder_->reports();
  trace.slices = trainer_->pipeline().slices();
  write_text(options_.file, trace_json(trace));
  written_ = true;
}

}  // namespace twobp
