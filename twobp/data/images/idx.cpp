// IDX, the format of MNIST's files: two zero bytes, the element type (8: byte), the number of dimensions, each
// dimension as a big-endian 32-bit number, then the elements. zlib's gzread also reads files that are not compressed.
#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <vector>
#include <zlib.h>

#include "twobp/core/check.h"
#include "twobp/data/images/pixel_array.h"
#include "twobp/files/npy.h"

namespace twobp {
namespace {

namespace fs = std::filesystem;

constexpr int kByteType = 8;
constexpr int64_t kMostBytes = int64_t{1} << 33;

struct Idx {
  std::vector<int64_t> shape;
  std::vector<uint8_t> bytes;
};

class GzFile {
 public:
  explicit GzFile(const std::string& path) : path_(path), file_(::gzopen(path.c_str(), "rbe")) {
    TWOBP_CHECK(file_ != nullptr, path_, ": cannot open: ", std::generic_category().message(errno), ".");
    ::gzbuffer(file_, 1 << 17);
  }
  ~GzFile() { ::gzclose(file_); }
  GzFile(const GzFile&) = delete;
  GzFile& operator=(const GzFile&) = delete;

  // Returns fewer bytes than `size` at the end of the file. Throws Error if a compressed file is truncated or damaged.
  size_t read(uint8_t* to, size_t size) {
    const int got = ::gzread(file_, to, static_cast<unsigned>(size));
    int status = Z_OK;
    const char* why = ::gzerror(file_, &status);
    TWOBP_CHECK(got >= 0 && (status == Z_OK || status == Z_STREAM_END), path_,
                ": damaged or truncated: ", status == Z_ERRNO ? std::generic_category().message(errno).c_str() : why,
                ": get the file again.");
    return static_cast<size_t>(got);
  }

 private:
  std::string path_;
  gzFile file_;
};

Idx read_file(const std::string& path, size_t dimensions) {
  GzFile file(path);
  std::vector<uint8_t> header(4 + 4 * dimensions);
  const size_t got = file.read(header.data(), header.size());
  TWOBP_CHECK(got >= 4 && header[0] == 0 && header[1] == 0, path,
              got < 4 ? ": truncated: it has no IDX header: get the file again."
                      : ": not an IDX file, by its first bytes: get the file again.");
  TWOBP_CHECK(header[2] == kByteType, path, ": IDX elements of type ", int{header[2]},
              ", but bytes (8) are expected: MNIST's files hold those.");
  TWOBP_CHECK(header[3] == dimensions, path, ": ", int{header[3]}, " dimensions, but ", dimensions,
              " are expected: pictures and labels may have been exchanged.");
  TWOBP_CHECK(got == header.size(), path, ": truncated: it ends within the IDX header: get the file again.");
  Idx out;
  int64_t size = 1;
  for (size_t d = 0; d < dimensions; ++d) {
    int64_t length = 0;
    for (size_t i = 0; i < 4; ++i) length = length << 8 | header[4 + 4 * d + i];
    TWOBP_CHECK(length > 0, path, ": dimension ", d, " is 0, so the file is empty: get the file again.");
    out.shape.push_back(length);
    const bool overflow = __builtin_mul_overflow(size, length, &size);
    TWOBP_CHECK(!overflow && size <= kMostBytes, path, ": the header claims more than ", kMostBytes,
                " bytes: the file is damaged.");
  }
  // Memory grows with the data, so that a header alone cannot request it.
  constexpr int64_t kBlock = 1 << 24;
  while (static_cast<int64_t>(out.bytes.size()) < size) {
    const size_t before = out.bytes.size();
    const auto block = static_cast<size_t>(std::min(kBlock, size - static_cast<int64_t>(before)));
    out.bytes.resize(before + block);
    const size_t here = file.read(out.bytes.data() + before, block);
    TWOBP_CHECK(here == block, path, ": truncated: shape ", shape_text(out.shape), " needs ", size, " bytes, but ",
                before + here, " follow the header: get the file again.");
  }
  uint8_t more = 0;
  TWOBP_CHECK(file.read(&more, 1) == 0, path, ": more bytes follow than the ", size, " of shape ",
              shape_text(out.shape), ": get the file again.");
  return out;
}

// The first of the usual spellings that exists, or "" if none does.
std::string find_file(const std::string& folder, const std::string& name, const std::string& type) {
  for (const char* dash : {"-", "."}) {
    for (const char* packed : {"", ".gz"}) {
      const std::string path = (fs::path(folder) / (name + dash + type + packed)).string();
      std::error_code ignored;
      if (fs::exists(path, ignored)) return path;
    }
  }
  return "";
}

std::string need_file(const std::string& folder, const std::string& name, const std::string& type) {
  const std::string path = find_file(folder, name, type);
  TWOBP_CHECK(!path.empty(), "data.idx: ", folder, ": there is no ", name, "-", type, " or ", name, "-", type,
              ".gz: name the folder that has MNIST's files.");
  return path;
}

}  // namespace

bool has_idx(const std::string& folder, const std::string& part) {
  return !find_file(folder, part + "-images", "idx3-ubyte").empty();
}

PixelArray read_idx(const std::string& folder, const std::string& part) {
  PixelArray out;
  out.path = need_file(folder, part + "-images", "idx3-ubyte");
  const std::string labels_path = need_file(folder, part + "-labels", "idx1-ubyte");
  Idx images = read_file(out.path, 3);
  const Idx labels = read_file(labels_path, 1);
  TWOBP_CHECK(labels.shape[0] == images.shape[0], labels_path, ": ", labels.shape[0], " labels, but ", out.path,
              " has ", images.shape[0], " pictures: take both from one data set.");
  out.count = images.shape[0];
  out.height = images.shape[1];
  out.width = images.shape[2];
  out.labels.assign(labels.bytes.begin(), labels.bytes.end());
  const auto owner = std::make_shared<const std::vector<uint8_t>>(std::move(images.bytes));
  out.pixels = owner->data();
  out.owner = owner;
  return out;
}

}  // namespace twobp
