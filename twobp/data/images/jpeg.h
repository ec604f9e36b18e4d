// Wraps libjpeg, which reports errors by longjmp, in calls that return.
#pragma once

#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <cstdio>  // jpeglib.h needs FILE
#include <jpeglib.h>
#include <span>

namespace twobp {

// Used once: read_header, then decode_into. Both return false if the file is damaged; error() describes the damage.
class JpegDecoder {
 public:
  explicit JpegDecoder(std::span<const uint8_t> bytes) : bytes_(bytes) {}
  ~JpegDecoder();
  JpegDecoder(const JpegDecoder&) = delete;
  JpegDecoder& operator=(const JpegDecoder&) = delete;

  bool read_header();
  // Decides on the layout; `reduce` is 1, 2, 4 or 8.
  bool prepare(int64_t reduce);
  int64_t height() const { return jpeg_.output_height ? jpeg_.output_height : jpeg_.image_height; }
  int64_t width() const { return jpeg_.output_width ? jpeg_.output_width : jpeg_.image_width; }
  // Number of components that decode_into writes: 1, 3, or 4 (CMYK).
  int64_t components() const { return jpeg_.output_components; }
  // Writes height() * width() * components() bytes.
  bool decode_into(uint8_t* to);

  const char* error() const { return message_; }

 private:
  static void on_error(j_common_ptr jpeg);
  static void on_message(j_common_ptr jpeg, int level);

  std::span<const uint8_t> bytes_;
  jpeg_decompress_struct jpeg_{};
  jpeg_error_mgr errors_{};
  std::jmp_buf failed_{};
  char message_[JMSG_LENGTH_MAX] = {};
};

}  // namespace twobp
