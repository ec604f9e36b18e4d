// The input is a pair of MNIST files, compressed or not: the images, a line "%%", the labels.
#include "fuzz/input.h"
#include "twobp/data/images/pixel_array.h"

using namespace twobp;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static fuzz::Folder folder;
  const auto files = fuzz::parts(data, size, 2);
  folder.write("train-images-idx3-ubyte", files[0]);  // zlib ignores the name
  folder.write("train-labels-idx1-ubyte", files[1]);
  const auto read = fuzz::accepted([&] { return read_idx(folder.path(), "train"); });
  if (!read) return 0;
  uint64_t sum = 0;
  const auto* pixels = static_cast<const uint8_t*>(read->pixels);
  for (int64_t i = 0; i < read->count * read->height * read->width; ++i) sum += pixels[i];
  fuzz::require(std::cmp_equal(read->labels.size(), read->count) && sum < UINT64_MAX, "labels are missing");
  return 0;
}
