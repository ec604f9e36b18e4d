// libjpeg may leave functions below by longjmp. So no object with a destructor may live in them.
#include "twobp/data/images/jpeg.h"

#include <jerror.h>

namespace twobp {
namespace {

// A progressive file may request any number of passes over the whole picture. Real files have about ten.
constexpr int kMostScans = 100;

}  // namespace

JpegDecoder::~JpegDecoder() {
  jpeg_destroy_decompress(&jpeg_);
}

void JpegDecoder::on_error(j_common_ptr jpeg) {
  auto* self = static_cast<JpegDecoder*>(jpeg->client_data);
  jpeg->err->format_message(jpeg, self->message_);
  std::longjmp(self->failed_, 1);
}

// libjpeg invents the missing pixels of a truncated file and only warns; here that is an error. Stray bytes between
// markers, which cameras write, remain a warning.
void JpegDecoder::on_message(j_common_ptr jpeg, int level) {
  if (level >= 0 || jpeg->err->msg_code == JWRN_EXTRANEOUS_DATA || jpeg->err->msg_code == JWRN_ADOBE_XFORM ||
      jpeg->err->msg_code == JWRN_JFIF_MAJOR) {
    return;
  }
  on_error(jpeg);
}

bool JpegDecoder::read_header() {
  jpeg_.err = jpeg_std_error(&errors_);
  jpeg_.client_data = this;
  errors_.error_exit = on_error;
  errors_.emit_message = on_message;
  if (setjmp(failed_) != 0) return false;
  jpeg_create_decompress(&jpeg_);
  jpeg_mem_src(&jpeg_, bytes_.data(), bytes_.size());
  jpeg_read_header(&jpeg_, TRUE);
  return true;
}

bool JpegDecoder::prepare(int64_t reduce) {
  if (setjmp(failed_) != 0) return false;
  const bool inks = jpeg_.jpeg_color_space == JCS_CMYK || jpeg_.jpeg_color_space == JCS_YCCK;
  const bool grey = jpeg_.jpeg_color_space == JCS_GRAYSCALE;
  jpeg_.out_color_space = inks ? JCS_CMYK : grey ? JCS_GRAYSCALE : JCS_RGB;
  jpeg_.scale_num = 1;
  jpeg_.scale_denom = static_cast<unsigned>(reduce);
  jpeg_calc_output_dimensions(&jpeg_);
  return true;
}

bool JpegDecoder::decode_into(uint8_t* to) {
  if (setjmp(failed_) != 0) return false;
  if (jpeg_has_multiple_scans(&jpeg_) != 0) {
    // Reads all scans first, so that they can be counted.
    jpeg_.buffered_image = TRUE;
    jpeg_start_decompress(&jpeg_);
    while (jpeg_input_complete(&jpeg_) == 0) {
      jpeg_consume_input(&jpeg_);
      if (jpeg_.input_scan_number > kMostScans) {
        std::snprintf(message_, sizeof(message_), "more than %d scans", kMostScans);
        return false;
      }
    }
    jpeg_start_output(&jpeg_, jpeg_.input_scan_number);
  } else {
    jpeg_start_decompress(&jpeg_);
  }
  const size_t stride = static_cast<size_t>(jpeg_.output_width) * static_cast<size_t>(jpeg_.output_components);
  while (jpeg_.output_scanline < jpeg_.output_height) {
    JSAMPROW row = to + jpeg_.output_scanline * stride;
    jpeg_read_scanlines(&jpeg_, &row, 1);
  }
  return true;
}

}  // namespace twobp
