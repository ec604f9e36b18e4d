#include "fuzz/input.h"

#include <cstdlib>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace twobp::fuzz {
namespace {

constexpr std::string_view kSeparator = "\n%%\n";

void overwrite(int fd, std::string_view content) {
  require(fd >= 0, "cannot open a file for the input");
  require(::ftruncate(fd, 0) == 0, "cannot truncate the input's file");
  size_t done = 0;
  while (done < content.size()) {
    const ssize_t wrote = ::pwrite(fd, content.data() + done, content.size() - done, static_cast<off_t>(done));
    require(wrote > 0, "cannot write the input's file");
    done += static_cast<size_t>(wrote);
  }
}

}  // namespace

std::vector<std::string_view> parts(const uint8_t* data, size_t size, size_t count) {
  std::string_view rest(reinterpret_cast<const char*>(data), size);
  std::vector<std::string_view> out;
  while (out.size() + 1 < count) {
    const size_t end = rest.find(kSeparator);
    if (end == std::string_view::npos) break;
    out.push_back(rest.substr(0, end));
    rest.remove_prefix(end + kSeparator.size());
  }
  out.push_back(rest);
  out.resize(count);
  return out;
}

File::File() : fd_(::memfd_create("twobp-fuzz", MFD_CLOEXEC)) {
  require(fd_ >= 0, "memfd_create failed");
  path_ = "/proc/self/fd/" + std::to_string(fd_);
}

File::~File() {
  ::close(fd_);
}

const std::string& File::holding(std::string_view content) {
  overwrite(fd_, content);
  return path_;
}

const std::string& File::holding(const uint8_t* data, size_t size) {
  return holding({reinterpret_cast<const char*>(data), size});
}

Folder::Folder() {
  std::error_code ignored;
  const bool shared_memory = std::filesystem::is_directory("/dev/shm", ignored);
  std::string name =
      (shared_memory ? "/dev/shm" : std::filesystem::temp_directory_path().string()) + "/twobp-fuzz-XXXXXX";
  require(::mkdtemp(name.data()) != nullptr, "cannot make a folder for the input");
  path_ = name;
}

Folder::~Folder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

void Folder::write(const std::string& name, std::string_view content) const {
  const int fd = ::open(path(name).c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  overwrite(fd, content);
  ::close(fd);
}

void Folder::remove(const std::string& name) const {
  std::error_code ignored;
  std::filesystem::remove(path_ / name, ignored);
}

}  // namespace twobp::fuzz
