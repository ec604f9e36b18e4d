// The input is one of CIFAR-10's binary files.
#include "fuzz/input.h"
#include "twobp/data/images/pixel_array.h"

using namespace twobp;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static fuzz::File file;
  const auto read = fuzz::accepted([&] { return read_cifar({file.holding(data, size)}); });
  if (!read) return 0;
  fuzz::require(std::cmp_equal(size, read->count * 3073), "records are missing");
  for (const int64_t label : read->labels) fuzz::require(label >= 0 && label <= 9, "a label is out of range");
  return 0;
}
