// POSIX open, fstat, pread.
#include "twobp/files/input_file.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <fcntl.h>
#include <string>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <utility>

#include "twobp/core/check.h"

namespace twobp {
namespace {

constexpr size_t kMostAtOnce = size_t{1} << 30;  // Linux reads at most 2 GiB at once

std::string open_error(int error) {
  std::string text = std::generic_category().message(error);
  if (error == EMFILE) text += ": join small files into larger ones, or raise the limit (ulimit -n)";
  return text;
}

using std::string_view_literals::operator""sv;

constexpr std::string_view kDecompress = "decompress it.";
constexpr std::string_view kConvert = "convert it to UTF-8, for instance with iconv.";
constexpr std::array<KnownFormat, 14> kFormats = {
    {{"\x93NUMPY"sv, "is a NumPy file", "write its numbers alone, with array.tofile(), or use data.arrays.",
      "name its folder in data.arrays."},
     {"PK\3\4"sv, "is a zip or .npz file", "write the numbers alone, with array.tofile().", "unpack it."},
     {"\x1f\x8b\x08"sv, "is compressed by gzip", kDecompress, kDecompress},
     {"\x28\xb5\x2f\xfd"sv, "is compressed by zstd", kDecompress, kDecompress},
     {"\xfd\x37zXZ\0"sv, "is compressed by xz", kDecompress, kDecompress},
     {"BZh91AY&SY"sv, "is compressed by bzip2", kDecompress, kDecompress},
     {"\x04\x22\x4d\x18"sv, "is compressed by lz4", kDecompress, kDecompress},
     {"PAR1"sv, "is a parquet file", "make arrays of it by scripts/texts_to_arrays.py.",
      "make arrays of it by scripts/texts_to_arrays.py."},
     {"ARROW1"sv, "is an Arrow file", "write it as a parquet file, for scripts/texts_to_arrays.py.",
      "write it as a parquet file, for scripts/texts_to_arrays.py."},
     {"\x89HDF"sv, "is an HDF5 file", "write its numbers alone, with array.tofile().", "write its text alone."},
     {"MMIDIDX"sv, "is the index of Megatron's token files", "give the .bin file alone.",
      "give the .bin file alone, in data.tokens."},
     {"\xef\xbb\xbf"sv, "begins with a byte order mark", "", "remove its first three bytes, which are no text."},
     {"\xff\xfe"sv, "is a text in UTF-16 or UTF-32", "", kConvert},
     {"\xfe\xff"sv, "is a text in UTF-16", "", kConvert}}};

}  // namespace

InputFile::InputFile(std::string path) : path_(std::move(path)) {
  // Without O_NONBLOCK, opening a named pipe would wait for a writer.
  fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  TWOBP_CHECK(fd_ >= 0, path_, ": cannot open: ", open_error(errno), ".");
  try {
    struct stat status {};
    TWOBP_CHECK(::fstat(fd_, &status) == 0, path_, ": cannot read its size: ", std::generic_category().message(errno),
                ".");
    TWOBP_CHECK(S_ISREG(status.st_mode), path_, ": is not a file",
                S_ISDIR(status.st_mode) ? " but a folder." : " of fixed size: copy its content into one.");
    size_ = static_cast<size_t>(status.st_size);
  } catch (...) {
    ::close(fd_);
    throw;
  }
}

InputFile::~InputFile() {
  if (fd_ >= 0) ::close(fd_);
}

InputFile::InputFile(InputFile&& other) noexcept
    : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)), size_(std::exchange(other.size_, 0)) {}

InputFile& InputFile::operator=(InputFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(fd_, other.fd_);
  std::swap(size_, other.size_);
  return *this;
}

void InputFile::read(size_t offset, void* to, size_t count) const {
  TWOBP_CHECK(offset <= size_ && count <= size_ - offset, path_, ": bytes ", offset, " to ", offset + count,
              " are outside the file, which has ", size_, ".");
  auto* next = static_cast<char*>(to);
  for (size_t done = 0; done < count;) {
    const ssize_t got =
        ::pread(fd_, next + done, std::min(count - done, kMostAtOnce), static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    TWOBP_CHECK(got >= 0, path_, ": cannot read: ", std::generic_category().message(errno), ".");
    TWOBP_CHECK(got > 0, path_, ": the file was truncated while it was in use: it had ", size_,
                " bytes and now ends before byte ", offset + done + 1,
                ": restore it, and give changed data a new file name.");
    done += static_cast<size_t>(got);
  }
}

std::vector<uint8_t> read_whole_file(const std::string& path) {
  const InputFile file(path);
  std::vector<uint8_t> bytes(file.size());
  file.read(0, bytes.data(), bytes.size());
  return bytes;
}

nlohmann::json read_json_object(const std::string& path, int max_depth, uint64_t max_bytes) {
  const InputFile file(path);
  TWOBP_CHECK(file.size() <= max_bytes, path, ": ", file.size(), " bytes, more than the ", max_bytes,
              " that such a file may have");
  std::string text(file.size(), '\0');
  file.read(0, text.data(), text.size());
  return parse_json_object(text, path, max_depth);
}

const KnownFormat* known_format(const InputFile& file) {
  constexpr size_t kLongest = 16;
  std::string head(std::min(kLongest, file.size()), 0);
  file.read(0, head.data(), head.size());
  const auto* found = std::find_if(kFormats.begin(), kFormats.end(),
                                   [&](const KnownFormat& one) { return head.starts_with(one.mark); });
  return found == kFormats.end() ? nullptr : found;
}

}  // namespace twobp
