#include <memory>
#include <string>
#include <vector>

#include "twobp/core/check.h"
#include "twobp/data/images/pixel_array.h"
#include "twobp/files/input_file.h"

namespace twobp {
namespace {

constexpr int64_t kSide = 32;
constexpr int64_t kPixels = 3 * kSide * kSide;
constexpr int64_t kRecord = 1 + kPixels;
constexpr int kMostLabel = 9;

}  // namespace

PixelArray read_cifar(const std::vector<std::string>& files) {
  TWOBP_CHECK(!files.empty(), "data.cifar: no file is given.");
  PixelArray out;
  out.path = files.front();
  out.channels = 3;
  out.height = kSide;
  out.width = kSide;
  const auto pixels = std::make_shared<std::vector<uint8_t>>();
  for (const auto& path : files) {
    const std::vector<uint8_t> bytes = read_whole_file(path);
    const auto size = static_cast<int64_t>(bytes.size());
    TWOBP_CHECK(size > 0 && size % kRecord == 0, path, ": ", size, " bytes, which is no whole number of the ", kRecord,
                " of a CIFAR-10 record: truncated, or CIFAR-100 or Python's version: get the binary version.");
    for (int64_t at = 0; at < size; at += kRecord) {
      const uint8_t* record = bytes.data() + at;
      TWOBP_CHECK(record[0] <= kMostLabel, path, ": record ", at / kRecord, " has label ", int{record[0]},
                  ", but CIFAR-10's are 0 to ", kMostLabel, ": get the file again.");
      out.labels.push_back(record[0]);
      pixels->insert(pixels->end(), record + 1, record + kRecord);
    }
  }
  out.count = static_cast<int64_t>(out.labels.size());
  out.pixels = pixels->data();
  out.owner = pixels;
  return out;
}

}  // namespace twobp
