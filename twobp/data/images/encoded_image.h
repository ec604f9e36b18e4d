// One JPEG or PNG picture, decoded by libjpeg and libpng. The bytes are untrusted.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include <ATen/ATen.h>

namespace twobp {

// The constructor reads the header, and decode() the rest. The bytes must outlive the object.
class EncodedImage {
 public:
  // `path` is for messages. Throws Error if the file is empty, is neither JPEG nor PNG (judged by its first bytes, not
  // by its name), has a damaged header, has more than 2^27 pixels, or is a grey PNG of 16 bits.
  EncodedImage(std::span<const uint8_t> bytes, std::string path);

  int64_t height() const { return height_; }
  int64_t width() const { return width_; }

  // Returns (channels, H, W) uint8, with the channels of a pixel adjacent in memory: the pixels of Pillow's
  // Image.convert("RGB"), or of "L" after that for one channel. So transparency, gamma, colour profiles and the EXIF
  // orientation change nothing. `reduce` of 2, 4 or 8 divides H and W of a JPEG, rounded up, which makes decoding
  // faster; a PNG keeps its full size. Throws Error if the file is damaged or truncated.
  at::Tensor decode(int64_t channels, int64_t reduce = 1) const;

 private:
  std::span<const uint8_t> bytes_;
  std::string path_;
  bool jpeg_ = false;
  int64_t height_ = 0;
  int64_t width_ = 0;
};

}  // namespace twobp
