// This file makes JPEG and PNG files for tests with their libraries, and the bytes of IDX and CIFAR-10 files.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <jpeglib.h>
#include <png.h>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>
#include <zlib.h>

#include "tests/train/helpers.h"

namespace twobp::test {

// The shape is (H, W, C). C is 1 (grey), 3 (colours) or 4 (colours and opacity, or inks in a JPEG).
struct Picture {
  int64_t height = 0;
  int64_t width = 0;
  int64_t channels = 3;
  std::vector<uint8_t> pixels;

  uint8_t at(int64_t y, int64_t x, int64_t c) const {
    return pixels[static_cast<size_t>((y * width + x) * channels + c)];
  }
};

// The picture is smooth, so that JPEG changes little of it. Each `number` gives another picture.
inline Picture picture(int64_t height, int64_t width, int64_t channels = 3, int64_t number = 0) {
  Picture out{height, width, channels, {}};
  for (int64_t y = 0; y < height; ++y) {
    for (int64_t x = 0; x < width; ++x) {
      for (int64_t c = 0; c < channels; ++c) {
        out.pixels.push_back(
            static_cast<uint8_t>((40 + 20 * number + y * 90 / height + x * 60 / width + 15 * c) % 256));
      }
    }
  }
  return out;
}

inline Picture filled(int64_t height, int64_t width, const std::vector<uint8_t>& pixel) {
  Picture out{height, width, static_cast<int64_t>(pixel.size()), {}};
  for (int64_t i = 0; i < height * width; ++i) out.pixels.insert(out.pixels.end(), pixel.begin(), pixel.end());
  return out;
}

inline std::string jpeg_file(const Picture& picture, bool progressive = false) {
  jpeg_compress_struct jpeg{};
  jpeg_error_mgr errors{};
  jpeg.err = jpeg_std_error(&errors);
  jpeg_create_compress(&jpeg);
  unsigned char* bytes = nullptr;
  unsigned long size = 0;
  jpeg_mem_dest(&jpeg, &bytes, &size);
  jpeg.image_height = static_cast<unsigned>(picture.height);
  jpeg.image_width = static_cast<unsigned>(picture.width);
  jpeg.input_components = static_cast<int>(picture.channels);
  jpeg.in_color_space = picture.channels == 1 ? JCS_GRAYSCALE : picture.channels == 3 ? JCS_RGB : JCS_CMYK;
  jpeg_set_defaults(&jpeg);
  jpeg_set_quality(&jpeg, 98, TRUE);
  if (progressive) jpeg_simple_progression(&jpeg);
  jpeg_start_compress(&jpeg, TRUE);
  while (jpeg.next_scanline < jpeg.image_height) {
    auto* row = const_cast<uint8_t*>(picture.pixels.data()) + jpeg.next_scanline * picture.width * picture.channels;
    jpeg_write_scanlines(&jpeg, &row, 1);
  }
  jpeg_finish_compress(&jpeg);
  std::string out(reinterpret_cast<const char*>(bytes), size);
  jpeg_destroy_compress(&jpeg);
  std::free(bytes);
  return out;
}

inline std::string png_file(const Picture& picture) {
  png_image image{};
  image.version = PNG_IMAGE_VERSION;
  image.height = static_cast<unsigned>(picture.height);
  image.width = static_cast<unsigned>(picture.width);
  image.format = picture.channels == 1 ? PNG_FORMAT_GRAY : picture.channels == 3 ? PNG_FORMAT_RGB : PNG_FORMAT_RGBA;
  std::string out(PNG_IMAGE_PNG_SIZE_MAX(image), '\0');
  size_t size = out.size();
  if (png_image_write_to_memory(&image, out.data(), &size, 0, picture.pixels.data(), 0, nullptr) == 0) {
    throw std::runtime_error(image.message);
  }
  return out.substr(0, size);
}

inline std::string big_endian(uint32_t value) {
  return {static_cast<char>(value >> 24), static_cast<char>(value >> 16 & 0xff), static_cast<char>(value >> 8 & 0xff),
          static_cast<char>(value & 0xff)};
}

struct PngHead {
  uint32_t width = 1;
  uint32_t height = 1;
  uint8_t depth = 8;
  uint8_t colours = PNG_COLOR_TYPE_RGB;
  bool interlaced = false;
};

// Makes a PNG file with any header. `rows` has the filter's byte before each row. `chunks` has names and contents.
inline std::string png_of(const PngHead& head, const std::vector<uint8_t>& rows,
                          const std::vector<std::pair<std::string, std::vector<uint8_t>>>& chunks = {}) {
  std::string out = "\x89PNG\r\n\x1a\n";
  const auto add = [&out](const std::string& name, const std::string& content) {
    const std::string checked = name + content;
    out += big_endian(static_cast<uint32_t>(content.size())) + checked +
           big_endian(static_cast<uint32_t>(
               ::crc32(0, reinterpret_cast<const Bytef*>(checked.data()), static_cast<uInt>(checked.size()))));
  };
  add("IHDR", big_endian(head.width) + big_endian(head.height) + static_cast<char>(head.depth) +
                  static_cast<char>(head.colours) + std::string(2, '\0') + static_cast<char>(head.interlaced));
  for (const auto& [name, content] : chunks) add(name, raw_bytes(content));
  std::string packed(::compressBound(static_cast<uLong>(rows.size())), '\0');
  uLongf size = static_cast<uLongf>(packed.size());
  ::compress(reinterpret_cast<Bytef*>(packed.data()), &size, rows.data(), static_cast<uLong>(rows.size()));
  add("IDAT", packed.substr(0, size));
  add("IEND", "");
  return out;
}

// Makes an IDX file of bytes.
inline std::string idx_file(const std::vector<uint32_t>& shape, const std::vector<uint8_t>& values) {
  std::string out{'\0', '\0', '\x08', static_cast<char>(shape.size())};
  for (const uint32_t size : shape) out += big_endian(size);
  return out + raw_bytes(values);
}

// Makes CIFAR-10 records: picture i is filled with i in red, 2 i in green and 3 i in blue.
inline std::string cifar_file(const std::vector<uint8_t>& labels) {
  std::string out;
  for (size_t i = 0; i < labels.size(); ++i) {
    out += static_cast<char>(labels[i]);
    for (size_t c = 1; c <= 3; ++c) out += std::string(1024, static_cast<char>(c * i));
  }
  return out;
}

}  // namespace twobp::test
