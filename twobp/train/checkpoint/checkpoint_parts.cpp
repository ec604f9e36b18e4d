#include <algorithm>
#include <array>
#include <chrono>
#include <set>
#include <system_error>
#include <thread>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/core/text.h"
#include "twobp/files/new_file.h"
#include "twobp/pipeline/pipeline.h"
#include "twobp/train/checkpoint/checkpoint_folder.h"
#include "twobp/transport/world.h"

namespace twobp {
namespace {

namespace fs = std::filesystem;

constexpr double kHurriedTimeout = 2;  // seconds
constexpr auto kLookForParts = std::chrono::milliseconds(5);

// Whether the file's header describes exactly these tensors.
bool has_the_same(const fs::path& path, const NamedTensors& tensors) {
  std::error_code ignored;
  if (!fs::exists(path, ignored)) return false;
  try {
    const SafetensorsFile file(path.string());
    if (file.names().size() != tensors.size()) return false;
    return std::all_of(tensors.begin(), tensors.end(), [&](const auto& item) {
      if (!file.contains(item.first)) return false;
      return at::IntArrayRef(file.shape(item.first)) == item.second.sizes() &&
             file.type(item.first) == item.second.scalar_type();
    });
  } catch (const Error&) {  // another process has removed the old checkpoint
    return false;
  }
}

// Links to an earlier frozen file if possible. Frozen files are large, and a good one was checked when it was written
// or opened, so it is not read again.
bool link_frozen(const fs::path& path, const NamedTensors& tensors, const FrozenFile& frozen) {
  for (const fs::path& folder : frozen.folders) {
    const fs::path there = folder / path.filename();
    if (!has_the_same(there, tensors)) continue;
    std::error_code error;  // file systems without links need a copy
    fs::create_hard_link(there, path, error);
    if (!error) return true;
  }
  return false;
}

// Grows while any process writes.
uint64_t bytes_in(const fs::path& folder) {
  uint64_t bytes = 0;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    std::error_code gone;
    const uint64_t size = fs::file_size(it->path(), gone);
    if (!gone) bytes += size + 1;
  }
  return bytes;
}

void take_part(const fs::path& folder, int64_t step, const CheckpointPart& part, FileList& files) {
  const fs::path path = folder / part_file_name(part);
  const PartReport report = read_part_report(path);
  TWOBP_CHECK(report.error.empty(), "process ", part.process, ": ", report.error);
  TWOBP_CHECK(report.step == step, path.string(), " is of step ", report.step, ", not of step ", step);
  TWOBP_CHECK(report.part.process == part.process && report.part.count == part.count, path.string(), " is of process ",
              report.part.process, " of ", report.part.count, ", not of process ", part.process, " of ", part.count);
  for (const auto& [name, facts] : report.files) {
    const auto kind = checkpoint_file_of(name);
    TWOBP_CHECK(kind && name == checkpoint_file_name(*kind, part), path.string(), " lists ", name,
                ", which is not that process's");
    std::error_code error;
    const uint64_t bytes = fs::file_size(folder / name, error);
    TWOBP_CHECK(!error && bytes == facts.bytes, (folder / name).string(), " of process ", part.process, " ",
                error ? "is missing" : concat("is damaged: ", bytes, " bytes instead of ", facts.bytes));
    files[name] = facts;
  }
}

}  // namespace

FileList write_part(const fs::path& folder, const CheckpointContent& content, const CheckpointPart& part,
                    const FrozenFile& frozen) {
  std::error_code error;
  fs::create_directory(folder, error);
  TWOBP_CHECK(!error, "cannot create the folder ", folder.string(), ": ", error.message());
  FileList files;
  const std::array<std::pair<CheckpointFile, const NamedTensors*>, 3> all = {
      {{CheckpointFile::kWeights, &content.weights},
       {CheckpointFile::kOptimizer, &content.optimizer},
       {CheckpointFile::kFrozen, &content.frozen}}};
  for (const auto& [file, tensors] : all) {
    if (tensors->empty()) continue;
    const std::string name = checkpoint_file_name(file, part);
    const fs::path path = folder / name;
    if (file == CheckpointFile::kFrozen && link_frozen(path, *tensors, frozen)) {
      files[name] = frozen.facts;
      continue;
    }
    write_safetensors(path.string(), *tensors, {{"format", "pt"}});
    files[name] = facts_of(path);
  }
  if (part.count > 1) {
    sync_folder(folder);  // also syncs a link's name before the part is reported
    try {
      write_part_report(folder / part_file_name(part), {content.state.position.step, part, files, ""});
    } catch (const Error&) {
      // As soon as the report has its name, the first process may rename the folder.
      std::error_code ignored;
      if (fs::exists(folder, ignored)) throw;
    }
  }
  return files;
}

void report_failed_part(const fs::path& folder, int64_t step, const CheckpointPart& part,
                        const std::string& error) noexcept {
  try {
    write_part_report(folder / part_file_name(part), {step, part, {}, error});
  } catch (const std::exception&) {
    // Then the first process waits in vain, until it learns that this process has ended.
  }
}

void commit_parts(const fs::path& folder, const CheckpointState& state, int count, FileList files,
                  const PartsWait& wait) {
  std::set<int> missing;
  for (int process = 1; process < count; ++process) missing.insert(process);
  uint64_t bytes = 0;
  double changed = awake_seconds();
  while (true) {
    for (auto process = missing.begin(); process != missing.end();) {
      const CheckpointPart part{*process, count};
      const bool there = fs::exists(folder / part_file_name(part));
      if (there) take_part(folder, state.position.step, part, files);
      process = there ? missing.erase(process) : std::next(process);
    }
    if (missing.empty()) break;
    if (const uint64_t now = bytes_in(folder); now != bytes) {
      bytes = now;
      changed = awake_seconds();
    }
    const bool hurry = wait.hurry != nullptr && *wait.hurry;
    const double timeout = hurry ? std::min(wait.timeout, kHurriedTimeout) : wait.timeout;
    if (awake_seconds() - changed > timeout) {
      std::vector<std::string> numbers;
      for (const int process : missing) numbers.push_back(std::to_string(process));
      fail("no part of process ", join(numbers), " in ", folder.string(), " after ", format_seconds(timeout),
           hurry ? "" : ": it is stuck, or does not see this folder (pipeline.timeout)");
    }
    std::this_thread::sleep_for(kLookForParts);
  }
  write_state(folder / kStateFile, state, files);
  for (int process = 0; count > 1 && process < count; ++process) {
    fs::remove(folder / part_file_name({process, count}));  // state.json has all the information
  }
  sync_folder(folder);
}

}  // namespace twobp
