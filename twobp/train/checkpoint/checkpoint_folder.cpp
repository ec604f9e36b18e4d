#include "twobp/train/checkpoint/checkpoint_folder.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <random>
#include <string_view>
#include <sys/file.h>
#include <system_error>
#include <thread>
#include <unistd.h>

#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/core/text.h"
#include "twobp/files/new_file.h"
#include "twobp/transport/world.h"

namespace twobp {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "step-";
constexpr std::string_view kNew = ".new";  // being written
constexpr std::string_view kOld = ".old";  // being removed
constexpr const char* kLock = ".lock";     // contains the run's id
constexpr size_t kIdLength = 16;
constexpr uint64_t kMostOfLock = 1 << 10;

std::string name_of(int64_t step) {
  std::array<char, 32> name{};
  std::snprintf(name.data(), name.size(), "step-%08lld", static_cast<long long>(step));
  return name.data();
}

// The step of "step-00000100" followed by `suffix`; -1 for anything else.
int64_t step_of(const std::string& name, std::string_view suffix) {
  if (name.size() < kPrefix.size() + suffix.size() || !name.starts_with(kPrefix) || !name.ends_with(suffix)) {
    return -1;
  }
  const char* end = name.data() + name.size() - suffix.size();
  int64_t step = -1;
  const auto [rest, status] = std::from_chars(name.data() + kPrefix.size(), end, step);
  return status == std::errc() && rest == end ? step : -1;
}

// "step-00000100.new", "step-00000100.0123456789abcdef.new", "step-00000100.old".
bool is_leftover(const std::string& name) {
  if (step_of(name, kNew) >= 0 || step_of(name, kOld) >= 0) return true;
  const size_t tail = 1 + kIdLength + kNew.size();
  if (name.size() <= tail || !name.ends_with(kNew)) return false;
  const std::string id = name.substr(name.size() - tail + 1, kIdLength);
  return id.find_first_not_of("0123456789abcdef") == std::string::npos &&
         step_of(name, "." + id + std::string(kNew)) >= 0;
}

fs::path with_suffix(const fs::path& path, std::string_view suffix) {
  return path.string() + std::string(suffix);
}

void remove_folder(const fs::path& path) {
  std::error_code error;
  fs::remove_all(path, error);
  TWOBP_CHECK(!error, "cannot remove ", path.string(), ": ", error.message());
}

void rename_folder(const fs::path& from, const fs::path& to) {
  std::error_code error;
  fs::rename(from, to, error);
  TWOBP_CHECK(!error, "cannot rename ", from.string(), " to ", to.string(), ": ", error.message());
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    names.push_back(it->path().filename().string());
  }
  TWOBP_CHECK(!error, "cannot list ", folder.string(), ": ", error.message());
  return names;
}

fs::path normal(const std::string& path) {
  const fs::path folder = fs::path(path).lexically_normal();
  return folder.has_filename() ? folder : folder.parent_path();  // "folder/"
}

std::string new_run_id() {
  std::random_device random;
  std::array<char, kIdLength + 1> id{};
  std::snprintf(id.data(), id.size(), "%08x%08x", random(), random());
  return id.data();
}

}  // namespace

CheckpointFolder::CheckpointFolder(const std::string& path, int64_t keep, int processes, double patience)
    : path_(normal(path)), keep_(keep), part_{0, processes}, run_id_(new_run_id()) {
  TWOBP_CHECK(keep >= 1, "save.keep must be at least 1, got ", keep);
  std::error_code error;
  const bool is_new = fs::create_directories(path_, error);
  TWOBP_CHECK(!error, "save.checkpoints: cannot create the folder ", path_.string(), ": ", error.message());
  if (is_new) sync_folder(fs::absolute(path_).parent_path());
  lock_ = ::open((path_ / kLock).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  TWOBP_CHECK(lock_ >= 0, "save.checkpoints: cannot write to the folder ", path_.string(), ": ", std::strerror(errno));
  try {
    lock(patience);
    clean();
    if (processes > 1) write_run_id();
  } catch (...) {
    ::close(lock_);
    throw;
  }
}

CheckpointFolder::CheckpointFolder(const std::string& path, const CheckpointPart& part, const std::string& run_id,
                                   double patience)
    : path_(normal(path)), part_(part), run_id_(run_id) {
  const double begin = awake_seconds();
  while (true) {
    const fs::path lock = path_ / kLock;
    if (fs::is_regular_file(lock) && read_text(lock.string(), kMostOfLock) == run_id) return;
    TWOBP_CHECK(awake_seconds() - begin < patience, "save.checkpoints: ", path_.string(), " of process ", part.process,
                " is not the folder of process 0: use a folder on a file system that all "
                "processes share");
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

CheckpointFolder::~CheckpointFolder() {
  if (lock_ >= 0) ::close(lock_);
}

void CheckpointFolder::lock(double patience) {
  const double begin = awake_seconds();
  while (::flock(lock_, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) return;  // some network file systems have no locks
    TWOBP_CHECK(awake_seconds() - begin < patience, "save.checkpoints: ", path_.string(),
                " is in use by another run, or by another trainer of this process: end that one first, or "
                "use another folder");
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

void CheckpointFolder::clean() {
  for (const std::string& name : names_in(path_)) {
    if (is_leftover(name)) remove_folder(path_ / name);
  }
  // The lock file may have existed before the folder was made read-only.
  const fs::path probe = with_suffix(of_step(0), kNew);
  std::error_code error;
  fs::create_directory(probe, error);
  TWOBP_CHECK(!error, "save.checkpoints: cannot write to the folder ", path_.string(), ": ", error.message());
  remove_folder(probe);
}

void CheckpointFolder::write_run_id() const {
  const auto bytes = static_cast<ssize_t>(run_id_.size());
  const bool written =
      ::ftruncate(lock_, 0) == 0 && ::pwrite(lock_, run_id_.data(), run_id_.size(), 0) == bytes && ::fsync(lock_) == 0;
  TWOBP_CHECK(written, "save.checkpoints: cannot write ", (path_ / kLock).string(), ": ", std::strerror(errno));
}

fs::path CheckpointFolder::of_step(int64_t step) const {
  return path_ / name_of(step);
}

fs::path CheckpointFolder::aside_of(int64_t step) const {
  const std::string id = part_.count == 1 ? "" : "." + run_id_;
  return with_suffix(of_step(step), id + std::string(kNew));
}

std::vector<int64_t> CheckpointFolder::steps() const {
  return checkpoint_steps(path_);
}

std::optional<Checkpoint> CheckpointFolder::newest(std::vector<std::string>& warnings) {
  std::vector<int64_t> all = steps();
  std::reverse(all.begin(), all.end());
  for (const int64_t step : all) {
    try {
      Checkpoint checkpoint(of_step(step));
      TWOBP_CHECK(checkpoint.state().position.step == step, of_step(step).string(), " holds step ",
                  checkpoint.state().position.step, ": the folder was renamed");
      take_frozen_of(checkpoint);
      for (std::string& warning : warnings) warning += ": using the previous checkpoint";
      return checkpoint;
    } catch (const Error& e) {
      warnings.emplace_back(e.what());
    }
  }
  TWOBP_CHECK(all.empty(), "save.checkpoints: none of the ", all.size(), " checkpoints in ", path_.string(),
              " is whole: ", warnings.empty() ? "" : warnings.front());
  return std::nullopt;
}

Checkpoint CheckpointFolder::open(int64_t step) {
  Checkpoint checkpoint(of_step(step), Checkpoint::Verify::kWhatIsRead);
  take_frozen_of(checkpoint);
  return checkpoint;
}

void CheckpointFolder::take_frozen_of(const Checkpoint& checkpoint) {
  const auto file = checkpoint.files().find(checkpoint_file_name(CheckpointFile::kFrozen, part_));
  if (file != checkpoint.files().end()) frozen_ = {{checkpoint.folder()}, file->second};
}

void CheckpointFolder::remove(int64_t step) {
  const fs::path old = with_suffix(of_step(step), kOld);
  remove_folder(old);
  rename_folder(of_step(step), old);  // renamed at once, so that a folder with a checkpoint's name is whole
  remove_folder(old);
}

void CheckpointFolder::add(const CheckpointContent& content, const PartsWait& wait,
                           const std::function<void()>& written) {
  const int64_t step = content.state.position.step;
  const fs::path aside = aside_of(step);
  if (part_.count == 1) remove_folder(aside);
  FileList files;
  try {
    files = write_part(aside, content, part_, frozen_);
    if (written) written();
    if (part_.process == 0) commit(content, files, wait);
  } catch (const std::exception& e) {
    if (part_.process == 0) {
      std::error_code ignored;
      fs::remove_all(aside, ignored);  // frees space on a full disk
    } else {
      report_failed_part(aside, step, part_, e.what());
    }
    throw;
  }
  const auto file = files.find(checkpoint_file_name(CheckpointFile::kFrozen, part_));
  // Another process may not have renamed the folder yet.
  if (file != files.end()) frozen_ = {{of_step(step), aside}, file->second};
}

void CheckpointFolder::commit(const CheckpointContent& content, const FileList& files, const PartsWait& wait) {
  const int64_t step = content.state.position.step;
  commit_parts(aside_of(step), content.state, part_.count, files, wait);
  const fs::path target = of_step(step);
  if (fs::exists(target)) remove(step);  // a damaged one
  rename_folder(aside_of(step), target);
  sync_folder(path_);
  std::vector<int64_t> all = steps();
  while (!all.empty() && all.back() > step) {
    remove(all.back());
    all.pop_back();
  }
  for (size_t i = 0; i + static_cast<size_t>(keep_) < all.size(); ++i) remove(all[i]);
}

std::vector<int64_t> checkpoint_steps(const fs::path& folder) {
  std::vector<int64_t> steps;
  for (const std::string& name : names_in(folder)) {
    const int64_t step = step_of(name, "");
    if (step >= 0 && name_of(step) == name) steps.push_back(step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

fs::path find_checkpoint(const fs::path& folder) {
  std::error_code ignored;
  TWOBP_CHECK(fs::exists(folder, ignored), folder.string(), " does not exist");
  TWOBP_CHECK(fs::is_directory(folder, ignored), folder.string(), " is not a folder: a checkpoint is one");
  const fs::path path = normal(folder.string());
  if (fs::exists(path / kStateFile, ignored)) return path;
  const std::vector<int64_t> steps = checkpoint_steps(path);
  if (steps.empty() && step_of(path.filename().string(), "") >= 0) return path;  // its state.json is missing
  TWOBP_CHECK(!steps.empty(), folder.string(), " is neither a checkpoint (it has no ", kStateFile,
              ") nor a folder of checkpoints (it has no step-00000100 or the like)");
  return path / name_of(steps.back());
}

}  // namespace twobp
