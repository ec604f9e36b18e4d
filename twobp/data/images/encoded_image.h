// One JPEG or PNG picture, decoded by libjpeg and libpng. The bytes are untrusted.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include <ATen/ATen.h>

namespace twobp {

// Reads the header when it is made, the rest when it is asked to. The bytes must outlive the object.
class EncodedImage {
 public:
  // `path` is for messages. Throws Error: empty, neither JPEG nor PNG (by the first bytes, whatever the name
  // says), a damaged header, more than 2^27 pixels.
  EncodedImage(std::span<const uint8_t> bytes, std::string path);

  int64_t height() const { return height_; }
  int64_t width() const { return width_; }

  // (channels, H, W) uint8, of which the channels lie beside each other in memory. `channels` is 1 (ITU-R
  // BT.601 luma) or 3 (red, green, blue); transparent pixels are laid over black; the orientation that EXIF
  // asks for is not applied. `reduce` of 2, 4 or 8: H and W are divided by it, rounded up, in a JPEG, which
  // is decoded faster so; a PNG comes at its full size. Throws Error: damaged or truncated.
  at::Tensor decode(int64_t channels, int64_t reduce = 1) const;

 private:
  std::span<const uint8_t> bytes_;
  std::string path_;
  bool jpeg_ = false;
  int64_t height_ = 0;
  int64_t width_ = 0;
};

}  // namespace twobp
