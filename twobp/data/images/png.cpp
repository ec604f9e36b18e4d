// libpng may leave functions below by longjmp. So no object with a destructor may live in them.
#include "twobp/data/images/png.h"

#include <cstdio>
#include <cstring>

namespace twobp {

PngDecoder::~PngDecoder() {
  png_destroy_read_struct(&png_, &info_, nullptr);
}

void PngDecoder::on_error(png_structp png, png_const_charp message) {
  auto* self = static_cast<PngDecoder*>(png_get_error_ptr(png));
  std::snprintf(self->message_, sizeof(self->message_), "%s", message);
  std::longjmp(self->failed_, 1);
}

// Warnings are about chunks that do not change pixels.
void PngDecoder::on_warning(png_structp /*png*/, png_const_charp /*message*/) {}

void PngDecoder::on_read(png_structp png, png_bytep to, size_t count) {
  auto* self = static_cast<PngDecoder*>(png_get_io_ptr(png));
  if (count > self->rest_.size()) png_error(png, "the file is truncated");
  std::memcpy(to, self->rest_.data(), count);
  self->rest_ = self->rest_.subspan(count);
}

bool PngDecoder::read_header() {
  if (setjmp(failed_) != 0) return false;
  png_ = png_create_read_struct(PNG_LIBPNG_VER_STRING, this, on_error, on_warning);
  info_ = png_ != nullptr ? png_create_info_struct(png_) : nullptr;
  if (info_ == nullptr) {
    std::snprintf(message_, sizeof(message_), "libpng has no memory or another version");
    return false;
  }
  png_set_read_fn(png_, this, on_read);
  png_set_user_limits(png_, PNG_UINT_31_MAX, PNG_UINT_31_MAX);  // the caller has limits of its own
  // Texts, profiles and so on may unpack to any size.
  png_set_keep_unknown_chunks(png_, PNG_HANDLE_CHUNK_NEVER, nullptr, -1);
  png_read_info(png_, info_);
  return true;
}

std::span<const png_color> PngDecoder::palette() const {
  png_colorp colours = nullptr;
  int count = 0;
  if (png_get_PLTE(png_, info_, &colours, &count) == 0) return {};
  return {colours, static_cast<size_t>(count)};
}

bool PngDecoder::decode_into(uint8_t* to) {
  if (setjmp(failed_) != 0) return false;
  png_set_strip_16(png_);
  png_set_strip_alpha(png_);
  png_set_packing(png_);
  if (colours() == PNG_COLOR_TYPE_GRAY) png_set_expand_gray_1_2_4_to_8(png_);
  const int passes = png_set_interlace_handling(png_);
  png_read_update_info(png_, info_);
  const size_t stride = png_get_rowbytes(png_, info_);
  const png_uint_32 rows = png_get_image_height(png_, info_);
  for (int pass = 0; pass < passes; ++pass) {
    for (png_uint_32 y = 0; y < rows; ++y) png_read_row(png_, to + y * stride, nullptr);
  }
  return true;
}

}  // namespace twobp
