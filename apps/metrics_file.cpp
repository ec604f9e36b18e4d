#include "apps/metrics_file.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <unistd.h>
#include <utility>

#include "apps/print.h"
#include "apps/stop_signals.h"
#include "twobp/core/check.h"
#include "twobp/files/new_file.h"

namespace twobp {

using nlohmann::json;

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
      const json value = json::parse(line, nullptr, /*allow_exceptions=*/false);
      if (!value.is_object() || !value.contains("step") || !value["step"].is_number_integer()) continue;
      if (value["step"].get<int64_t>() > step) continue;
      line += '\n';
      kept.write(line.data(), line.size());
    }
    kept.commit();
  }
  open();
}

void MetricsFile::write(const json& line) {
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

}  // namespace twobp
