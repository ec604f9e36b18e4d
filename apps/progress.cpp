#include "apps/progress.h"

#include <numeric>
#include <unistd.h>

#include "apps/print.h"
#include "twobp/core/check.h"
#include "twobp/core/text.h"

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

}  // namespace twobp
