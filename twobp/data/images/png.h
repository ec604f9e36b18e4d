// Wraps libpng, which reports errors by longjmp, in calls that return.
#pragma once

#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <png.h>
#include <span>

namespace twobp {

// Reads the numbers in the file as they are: gamma, colour profiles and transparency change nothing, as in Pillow's
// Image.convert. Of numbers of 16 bits it keeps the upper 8. Used once: read_header, then decode_into. Both return
// false if the file is damaged; error() describes the damage.
class PngDecoder {
 public:
  explicit PngDecoder(std::span<const uint8_t> bytes) : rest_(bytes) {}
  ~PngDecoder();
  PngDecoder(const PngDecoder&) = delete;
  PngDecoder& operator=(const PngDecoder&) = delete;

  bool read_header();
  int64_t height() const { return png_get_image_height(png_, info_); }
  int64_t width() const { return png_get_image_width(png_, info_); }
  int depth() const { return png_get_bit_depth(png_, info_); }  // bits of a number
  // PNG_COLOR_TYPE_GRAY, _GRAY_ALPHA, _PALETTE, _RGB, or _RGB_ALPHA.
  int colours() const { return png_get_color_type(png_, info_); }
  // The colours of a picture with a palette.
  std::span<const png_color> palette() const;
  // Writes height() * width() pixels: 3 bytes for RGB, else one (grey, or the index of a palette's colour).
  bool decode_into(uint8_t* to);

  const char* error() const { return message_; }

 private:
  static void on_error(png_structp png, png_const_charp message);
  static void on_warning(png_structp png, png_const_charp message);
  static void on_read(png_structp png, png_bytep to, size_t count);

  std::span<const uint8_t> rest_;
  png_structp png_ = nullptr;
  png_infop info_ = nullptr;
  std::jmp_buf failed_{};
  char message_[128] = {};
};

}  // namespace twobp
