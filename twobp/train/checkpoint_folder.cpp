#include "twobp/train/checkpoint_folder.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <string_view>
#include <sys/file.h>
#include <system_error>
#include <unistd.h>

#include "twobp/core/check.h"
#include "twobp/train/new_file.h"

namespace twobp {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "step-";
constexpr std::string_view kNew = ".new";  // being written
constexpr std::string_view kOld = ".old";  // being removed
constexpr const char* kLock = ".lock";

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

}  // namespace

CheckpointFolder::CheckpointFolder(const std::string& path, int64_t keep)
    : path_(fs::path(path).lexically_normal()), keep_(keep) {
  TWOBP_CHECK(keep >= 1, "save.keep must be at least 1, got ", keep);
  if (!path_.has_filename()) path_ = path_.parent_path();  // "folder/"
  std::error_code error;
  const bool is_new = fs::create_directories(path_, error);
  TWOBP_CHECK(!error, "save.checkpoints: cannot create the folder ", path_.string(), ": ", error.message());
  if (is_new) sync_folder(fs::absolute(path_).parent_path());

  lock_ = ::open((path_ / kLock).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  TWOBP_CHECK(lock_ >= 0, "save.checkpoints: cannot write to the folder ", path_.string(), ": ",
              std::strerror(errno));
  try {
    // Some network file systems have no locks: then there is none.
    TWOBP_CHECK(::flock(lock_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK,
                "save.checkpoints: ", path_.string(), " is in use by another run");
    for (const std::string& name : names_in(path_)) {
      if (step_of(name, kNew) >= 0 || step_of(name, kOld) >= 0) remove_folder(path_ / name);
    }
    // The lock's file may have been there before the folder was made read-only.
    const fs::path probe = with_suffix(of_step(0), kNew);
    fs::create_directory(probe, error);
    TWOBP_CHECK(!error, "save.checkpoints: cannot write to the folder ", path_.string(), ": ",
                error.message());
    remove_folder(probe);
  } catch (...) {
    ::close(lock_);
    throw;
  }
}

CheckpointFolder::~CheckpointFolder() {
  ::close(lock_);
}

fs::path CheckpointFolder::of_step(int64_t step) const {
  char name[32];
  std::snprintf(name, sizeof(name), "step-%08lld", static_cast<long long>(step));
  return path_ / name;
}

std::vector<int64_t> CheckpointFolder::steps() const {
  std::vector<int64_t> steps;
  for (const std::string& name : names_in(path_)) {
    const int64_t step = step_of(name, "");
    if (step >= 0 && of_step(step).filename() == name) steps.push_back(step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

std::optional<Checkpoint> CheckpointFolder::newest(std::vector<std::string>& warnings) {
  const std::vector<int64_t> all = steps();
  for (auto step = all.rbegin(); step != all.rend(); ++step) {
    try {
      Checkpoint checkpoint(of_step(*step));
      TWOBP_CHECK(checkpoint.state().position.step == *step, of_step(*step).string(), " is of step ",
                  checkpoint.state().position.step, ": the folder was renamed");
      frozen_from_ = checkpoint.folder();
      for (std::string& warning : warnings) warning += ": taking the checkpoint before";
      return checkpoint;
    } catch (const Error& e) {
      warnings.emplace_back(e.what());
    }
  }
  TWOBP_CHECK(all.empty(), "save.checkpoints: none of the ", all.size(), " checkpoints in ", path_.string(),
              " is whole: ", warnings.empty() ? "" : warnings.front());
  return std::nullopt;
}

void CheckpointFolder::remove(int64_t step) {
  const fs::path old = with_suffix(of_step(step), kOld);
  remove_folder(old);
  rename_folder(of_step(step), old);  // at once: what has a checkpoint's name is whole
  remove_folder(old);
}

void CheckpointFolder::add(const CheckpointContent& content) {
  const int64_t step = content.state.position.step;
  const fs::path target = of_step(step);
  const fs::path aside = with_suffix(target, kNew);
  remove_folder(aside);
  try {
    write_checkpoint(aside, content, frozen_from_);
    if (fs::exists(target)) remove(step);  // a damaged one
    rename_folder(aside, target);
    sync_folder(path_);
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(aside, ignored);  // a full disk has room again
    throw;
  }
  frozen_from_ = target;
  std::vector<int64_t> all = steps();
  while (!all.empty() && all.back() > step) {
    remove(all.back());
    all.pop_back();
  }
  for (size_t i = 0; i + static_cast<size_t>(keep_) < all.size(); ++i) remove(all[i]);
}

}  // namespace twobp
