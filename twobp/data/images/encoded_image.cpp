#include "twobp/data/images/encoded_image.h"

#include <algorithm>
#include <cstring>
#include <png.h>
#include <string_view>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/data/images/jpeg.h"

namespace twobp {
namespace {

constexpr int64_t kMostPixels = int64_t{1} << 27;
// No picture is compressed this much. PNG reaches 8256 (one bit per pixel, which deflate shortens 1032
// times), and JPEG without arithmetic coding 512 (one bit for 8 x 8 pixels).
constexpr int64_t kMostPixelsPerByte = 1 << 14;
constexpr std::string_view kJpegBegin = "\xff\xd8\xff";
constexpr std::string_view kPngBegin = "\x89PNG\r\n\x1a\n";

bool begins_with(std::span<const uint8_t> bytes, std::string_view begin) {
  return bytes.size() >= begin.size() && std::memcmp(bytes.data(), begin.data(), begin.size()) == 0;
}

[[noreturn]] void damaged(const std::string& path, const char* format, const char* why) {
  fail(path, ": damaged ", format, " file: ", why, ": replace it or remove it.");
}

void check_pixels(const std::string& path, int64_t height, int64_t width, size_t bytes) {
  TWOBP_CHECK(height > 0 && width > 0, path, ": a picture of ", width, " x ", height,
              " pixels: replace it or remove it.");
  TWOBP_CHECK(height <= kMostPixels / width, path, ": ", width, " x ", height, " pixels, more than the ",
              kMostPixels, " that a picture may have: scale it down or remove it.");
  TWOBP_CHECK(height * width / kMostPixelsPerByte <= static_cast<int64_t>(bytes), path, ": ", width, " x ",
              height, " pixels in a file of ", bytes, " bytes: damaged: replace it or remove it.");
}

// libpng's simplified reader. The destructor frees it in any case.
class PngReader {
 public:
  PngReader(std::span<const uint8_t> bytes, const std::string& path) : path_(path) {
    image_.version = PNG_IMAGE_VERSION;
    if (png_image_begin_read_from_memory(&image_, bytes.data(), bytes.size()) == 0) {
      png_image_free(&image_);
      damaged(path_, "PNG", image_.message);
    }
    image_.flags |= PNG_IMAGE_FLAG_16BIT_sRGB;  // otherwise 16-bit files count as linear
  }
  ~PngReader() { png_image_free(&image_); }
  PngReader(const PngReader&) = delete;
  PngReader& operator=(const PngReader&) = delete;

  int64_t height() const { return image_.height; }
  int64_t width() const { return image_.width; }
  bool coloured() const { return (image_.format & PNG_FORMAT_FLAG_COLOR) != 0; }

  void decode_into(uint8_t* to, bool grey) {
    image_.format = grey ? PNG_FORMAT_GRAY : PNG_FORMAT_RGB;
    if (png_image_finish_read(&image_, nullptr, to, 0, nullptr) == 0) damaged(path_, "PNG", image_.message);
  }

 private:
  const std::string& path_;
  png_image image_{};
};

at::Tensor pixels(int64_t height, int64_t width, int64_t channels) {
  return at::zeros({height, width, channels}, at::kByte);
}

// (H, W, 3) to (H, W, 1): ITU-R BT.601, as JPEG's own luma.
at::Tensor luma(const at::Tensor& colours) {
  at::Tensor out = pixels(colours.size(0), colours.size(1), 1);
  const uint8_t* from = colours.const_data_ptr<uint8_t>();
  uint8_t* to = out.data_ptr<uint8_t>();
  for (int64_t i = 0; i < out.numel(); ++i, from += 3) {
    to[i] = static_cast<uint8_t>((19595U * from[0] + 38470U * from[1] + 7471U * from[2] + 0x8000U) >> 16);
  }
  return out;
}

// (H, W, 4) to (H, W, 3), without a colour profile: each ink absorbs its part of the light that black leaves.
at::Tensor from_inks(const at::Tensor& inks, bool inverted) {
  at::Tensor out = pixels(inks.size(0), inks.size(1), 3);
  const uint8_t* from = inks.const_data_ptr<uint8_t>();
  uint8_t* to = out.data_ptr<uint8_t>();
  const auto light = [inverted](uint8_t ink) { return inverted ? int{ink} : 255 - ink; };
  for (int64_t i = 0; i < out.numel(); i += 3, from += 4) {
    for (int c = 0; c < 3; ++c)
      to[i + c] = static_cast<uint8_t>((light(from[c]) * light(from[3]) + 127) / 255);
  }
  return out;
}

at::Tensor decode_jpeg(std::span<const uint8_t> bytes, const std::string& path, int64_t channels,
                       int64_t reduce) {
  JpegDecoder decoder(bytes);
  const bool grey = channels == 1;
  if (!decoder.read_header() || !decoder.prepare(grey, reduce)) damaged(path, "JPEG", decoder.error());
  check_pixels(path, decoder.height(), decoder.width(), bytes.size());
  at::Tensor out = pixels(decoder.height(), decoder.width(), decoder.components());
  if (!decoder.decode_into(out.data_ptr<uint8_t>())) damaged(path, "JPEG", decoder.error());
  if (decoder.components() == 4) out = from_inks(out, decoder.inks_inverted());
  return grey && out.size(2) == 3 ? luma(out) : out;
}

at::Tensor decode_png(std::span<const uint8_t> bytes, const std::string& path, int64_t channels) {
  PngReader reader(bytes, path);
  check_pixels(path, reader.height(), reader.width(), bytes.size());
  const bool grey = channels == 1 && !reader.coloured();
  at::Tensor out = pixels(reader.height(), reader.width(), grey ? 1 : 3);
  reader.decode_into(out.data_ptr<uint8_t>(), grey);
  return channels == 1 && !grey ? luma(out) : out;
}

}  // namespace

EncodedImage::EncodedImage(std::span<const uint8_t> bytes, std::string path)
    : bytes_(bytes), path_(std::move(path)), jpeg_(begins_with(bytes, kJpegBegin)) {
  TWOBP_CHECK(!bytes.empty(), path_, ": the file is empty: replace it or remove it.");
  TWOBP_CHECK(jpeg_ || begins_with(bytes, kPngBegin), path_,
              ": neither a JPEG nor a PNG file, by its first bytes: convert it or remove it.");
  if (jpeg_) {
    JpegDecoder decoder(bytes_);
    if (!decoder.read_header()) damaged(path_, "JPEG", decoder.error());
    height_ = decoder.height();
    width_ = decoder.width();
  } else {
    const PngReader reader(bytes_, path_);
    height_ = reader.height();
    width_ = reader.width();
  }
  check_pixels(path_, height_, width_, bytes_.size());
}

at::Tensor EncodedImage::decode(int64_t channels, int64_t reduce) const {
  TWOBP_CHECK(channels == 1 || channels == 3, path_, ": pictures have 1 or 3 channels, not ", channels, ".");
  const at::Tensor image = jpeg_ ? decode_jpeg(bytes_, path_, channels, reduce)
                                 : decode_png(bytes_, path_, channels);  // (H, W, C)
  return image.permute({2, 0, 1});
}

}  // namespace twobp
