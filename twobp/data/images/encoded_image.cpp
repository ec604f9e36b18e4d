#include "twobp/data/images/encoded_image.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/data/images/jpeg.h"
#include "twobp/data/images/png.h"

namespace twobp {
namespace {

constexpr int64_t kMostPixels = int64_t{1} << 27;
// No picture is compressed this much. PNG reaches 8256 (one bit per pixel, which deflate shortens 1032 times), and JPEG
// without arithmetic coding 512 (one bit for 8 x 8 pixels).
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
  TWOBP_CHECK(height <= kMostPixels / width, path, ": ", width, " x ", height, " pixels, more than the ", kMostPixels,
              " that a picture may have: scale it down or remove it.");
  TWOBP_CHECK(height * width / kMostPixelsPerByte <= static_cast<int64_t>(bytes), path, ": ", width, " x ", height,
              " pixels in a file of ", bytes, " bytes: damaged: replace it or remove it.");
}

void check_png(const PngDecoder& decoder, const std::string& path, size_t bytes) {
  check_pixels(path, decoder.height(), decoder.width(), bytes);
  TWOBP_CHECK(decoder.depth() < 16 || decoder.colours() != PNG_COLOR_TYPE_GRAY, path,
              ": a grey PNG of 16 bits, which some programs scale and others (Pillow) clip at 255: convert it "
              "to 8 bits.");
}

at::Tensor pixels(int64_t height, int64_t width, int64_t channels) {
  return at::zeros({height, width, channels}, at::kByte);
}

// (H, W, 3) to (H, W, 1): ITU-R BT.601, as Pillow computes it.
at::Tensor luma(const at::Tensor& colours) {
  at::Tensor out = pixels(colours.size(0), colours.size(1), 1);
  const uint8_t* from = colours.const_data_ptr<uint8_t>();
  uint8_t* to = out.data_ptr<uint8_t>();
  for (int64_t i = 0; i < out.numel(); ++i, from += 3) {
    to[i] = static_cast<uint8_t>((19595U * from[0] + 38470U * from[1] + 7471U * from[2] + 0x8000U) >> 16);
  }
  return out;
}

// (H, W, 4) to (H, W, 3), without a colour profile: each ink absorbs its part of the light that black leaves. 255 is no
// ink, as in files of Adobe's programs. Pillow takes this for granted, too.
at::Tensor from_inks(const at::Tensor& inks) {
  at::Tensor out = pixels(inks.size(0), inks.size(1), 3);
  const uint8_t* from = inks.const_data_ptr<uint8_t>();
  uint8_t* to = out.data_ptr<uint8_t>();
  for (int64_t i = 0; i < out.numel(); i += 3, from += 4) {
    for (int c = 0; c < 3; ++c) to[i + c] = static_cast<uint8_t>((from[c] * from[3] + 127) / 255);
  }
  return out;
}

// (H, W, 1) indices to (H, W, 3). A colour that the palette lacks is black, as in Pillow.
at::Tensor from_palette(const at::Tensor& indices, std::span<const png_color> palette) {
  at::Tensor out = pixels(indices.size(0), indices.size(1), 3);
  const uint8_t* from = indices.const_data_ptr<uint8_t>();
  uint8_t* to = out.data_ptr<uint8_t>();
  for (int64_t i = 0; i < out.numel(); i += 3, ++from) {
    if (*from >= palette.size()) continue;
    const png_color& colour = palette[*from];
    to[i] = colour.red;
    to[i + 1] = colour.green;
    to[i + 2] = colour.blue;
  }
  return out;
}

// Returns (H, W, 1) for a grey picture, else (H, W, 3).
at::Tensor decode_jpeg(std::span<const uint8_t> bytes, const std::string& path, int64_t reduce) {
  JpegDecoder decoder(bytes);
  if (!decoder.read_header() || !decoder.prepare(reduce)) damaged(path, "JPEG", decoder.error());
  check_pixels(path, decoder.height(), decoder.width(), bytes.size());
  at::Tensor out = pixels(decoder.height(), decoder.width(), decoder.components());
  if (!decoder.decode_into(out.data_ptr<uint8_t>())) damaged(path, "JPEG", decoder.error());
  return decoder.components() == 4 ? from_inks(out) : out;
}

at::Tensor decode_png(std::span<const uint8_t> bytes, const std::string& path) {
  PngDecoder decoder(bytes);
  if (!decoder.read_header()) damaged(path, "PNG", decoder.error());
  check_png(decoder, path, bytes.size());
  const bool rgb = (decoder.colours() | PNG_COLOR_MASK_ALPHA) == PNG_COLOR_TYPE_RGB_ALPHA;
  at::Tensor out = pixels(decoder.height(), decoder.width(), rgb ? 3 : 1);
  if (!decoder.decode_into(out.data_ptr<uint8_t>())) damaged(path, "PNG", decoder.error());
  return decoder.colours() == PNG_COLOR_TYPE_PALETTE ? from_palette(out, decoder.palette()) : out;
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
    check_pixels(path_, height_, width_, bytes_.size());
  } else {
    PngDecoder decoder(bytes_);
    if (!decoder.read_header()) damaged(path_, "PNG", decoder.error());
    check_png(decoder, path_, bytes_.size());
    height_ = decoder.height();
    width_ = decoder.width();
  }
}

at::Tensor EncodedImage::decode(int64_t channels, int64_t reduce) const {
  TWOBP_CHECK(channels == 1 || channels == 3, path_, ": pictures have 1 or 3 channels, not ", channels, ".");
  at::Tensor image = jpeg_ ? decode_jpeg(bytes_, path_, reduce) : decode_png(bytes_, path_);  // (H, W, C)
  if (channels == 1 && image.size(2) == 3) image = luma(image);
  if (channels == 3 && image.size(2) == 1) image = image.expand({-1, -1, 3}).contiguous();
  return image.permute({2, 0, 1});
}

}  // namespace twobp
