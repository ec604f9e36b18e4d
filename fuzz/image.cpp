// The input is a JPEG or PNG image. It is decoded as for training. The first byte selects the options.
#include "fuzz/input.h"
#include "twobp/data/images/encoded_image.h"

using namespace twobp;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr int64_t kMostPixels = 1 << 18;  // larger images only take longer
  if (size == 0) return 0;
  const int64_t channels = (data[0] & 1) != 0 ? 1 : 3;
  const int64_t reduce = int64_t{1} << (data[0] >> 1 & 3);
  const std::vector<uint8_t> bytes(data + 1, data + size);  // this exact size reveals reads past the end
  const auto image = fuzz::accepted([&] { return EncodedImage(bytes, "fuzz.jpg"); });
  if (!image || image->height() * image->width() > kMostPixels) return 0;
  const auto pixels = fuzz::accepted([&] { return image->decode(channels, reduce); });
  if (!pixels) return 0;
  fuzz::require(pixels->size(0) == channels && pixels->size(1) <= image->height() &&
                    pixels->size(2) <= image->width() && pixels->numel() > 0,
                "the shape differs from the header");
  return 0;
}
