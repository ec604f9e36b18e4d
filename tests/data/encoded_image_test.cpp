// Decoding JPEG and PNG: what comes out, and that nothing damaged gets through or does worse than an Error.
#include "twobp/data/images/encoded_image.h"

#include <cmath>
#include <random>
#include <zlib.h>

#include <gtest/gtest.h>

#include "image_files.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_error;
using test::filled;
using test::jpeg_file;
using test::Picture;
using test::picture;
using test::png_file;

std::span<const uint8_t> bytes_of(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

at::Tensor decode(const std::string& file, int64_t channels = 3, int64_t reduce = 1) {
  return EncodedImage(bytes_of(file), "a.img").decode(channels, reduce);
}

void refuse(const std::string& file, const std::vector<std::string>& parts) {
  auto all = parts;
  all.emplace_back("a.img");
  expect_error([&] { decode(file); }, all);
}

// The largest difference to the pixels of `expected`.
int difference(const at::Tensor& image, const Picture& expected) {
  EXPECT_EQ(image.sizes(), (std::vector<int64_t>{expected.channels, expected.height, expected.width}));
  const at::Tensor pixels = image.permute({1, 2, 0}).contiguous();
  int worst = 0;
  for (size_t i = 0; i < expected.pixels.size(); ++i) {
    worst = std::max(worst, std::abs(int{pixels.data_ptr<uint8_t>()[i]} - int{expected.pixels[i]}));
  }
  return worst;
}

TEST(EncodedImage, PngIsExact) {
  for (const int64_t channels : {1, 3}) {
    const Picture expected = picture(13, 21, channels);
    EXPECT_EQ(difference(decode(png_file(expected), channels), expected), 0);
  }
}

TEST(EncodedImage, JpegIsClose) {
  for (const bool progressive : {false, true}) {
    for (const int64_t channels : {1, 3}) {
      const Picture expected = picture(37, 50, channels);
      EXPECT_LE(difference(decode(jpeg_file(expected, progressive), channels), expected), 4) << progressive;
    }
  }
}

TEST(EncodedImage, SizeIsKnownFromTheHeader) {
  for (const std::string& file : {png_file(picture(13, 21)), jpeg_file(picture(13, 21))}) {
    const EncodedImage image(bytes_of(file), "a.img");
    EXPECT_EQ(image.height(), 13);
    EXPECT_EQ(image.width(), 21);
  }
}

TEST(EncodedImage, GreyBecomesColoursAndColoursGrey) {
  for (const std::string& file : {png_file(filled(4, 4, {77})), jpeg_file(filled(4, 4, {77}))}) {
    EXPECT_EQ(difference(decode(file, 3), filled(4, 4, {77, 77, 77})), 0);
  }
  const uint8_t luma = 110;  // 0.299 * 200 + 0.587 * 50 + 0.114 * 180, ITU-R BT.601
  EXPECT_EQ(difference(decode(png_file(filled(4, 4, {200, 50, 180})), 1), filled(4, 4, {luma})), 0);
  EXPECT_LE(difference(decode(jpeg_file(filled(4, 4, {200, 50, 180})), 1), filled(4, 4, {luma})), 1);
  expect_error([] { decode(png_file(picture(4, 4)), 2); }, {"1 or 3 channels"});
}

TEST(EncodedImage, TransparentPixelsLieOverBlack) {
  EXPECT_EQ(difference(decode(png_file(filled(3, 3, {200, 100, 50, 255}))), filled(3, 3, {200, 100, 50})), 0);
  EXPECT_EQ(difference(decode(png_file(filled(3, 3, {200, 100, 50, 0}))), filled(3, 3, {0, 0, 0})), 0);
}

// libjpeg writes inks with Adobe's marker, whose inks are inverted: 255 is no ink.
TEST(EncodedImage, InksBecomeColours) {
  const std::string file = jpeg_file(filled(8, 8, {255, 128, 0, 255}));
  EXPECT_LE(difference(decode(file), filled(8, 8, {255, 128, 0})), 3);
  EXPECT_LE(difference(decode(jpeg_file(filled(8, 8, {255, 128, 0, 128}))), filled(8, 8, {128, 64, 0})), 3);
  EXPECT_EQ(decode(file, 1).size(0), 1);
}

TEST(EncodedImage, JpegComesSmallerIfAsked) {
  const std::string file = jpeg_file(picture(70, 100));
  for (const int64_t reduce : {2, 4, 8}) {
    const at::Tensor image = decode(file, 3, reduce);
    EXPECT_EQ(image.size(1), (70 + reduce - 1) / reduce);
    EXPECT_EQ(image.size(2), (100 + reduce - 1) / reduce);
    // Its pixels are means of the whole picture's.
    const double mean = image.to(at::kDouble).mean().item<double>();
    EXPECT_NEAR(mean, decode(file).to(at::kDouble).mean().item<double>(), 3);
  }
  EXPECT_EQ(decode(png_file(picture(70, 100)), 3, 4).size(1), 70);
}

TEST(EncodedImage, WhatIsNoPicture) {
  refuse("", {"empty"});
  refuse("GIF89a", {"neither a JPEG nor a PNG"});
  refuse("\xff\xd8\xff", {"damaged JPEG"});
  refuse(png_file(picture(4, 4)).substr(0, 8), {"damaged PNG"});
}

TEST(EncodedImage, EveryTruncationIsFound) {
  for (const bool progressive : {false, true}) {
    const std::string whole = jpeg_file(picture(24, 24), progressive);
    // The last two bytes are the marker of the end, without which every pixel is there.
    for (size_t size = 0; size + 2 < whole.size(); ++size) {
      SCOPED_TRACE(size);
      refuse(whole.substr(0, size), {});
    }
  }
  const std::string whole = png_file(picture(24, 24));
  for (size_t size = 0; size + 12 < whole.size(); ++size) {  // the last chunk has 12 bytes and no pixels
    SCOPED_TRACE(size);
    refuse(whole.substr(0, size), {});
  }
}

TEST(EncodedImage, HugeSizesAreRefusedBeforeMemoryIsTaken) {
  std::string jpeg = jpeg_file(picture(8, 8));
  const size_t frame = jpeg.find("\xff\xc0");
  ASSERT_NE(frame, std::string::npos);
  jpeg.replace(frame + 5, 4, "\xff\x00\xff\x00", 4);  // 65280 x 65280
  refuse(jpeg, {"65280 x 65280", "more than"});
  // Few enough, but not in so small a file: the header alone must not ask for 360 MB.
  jpeg.replace(frame + 5, 4, "\x2a\xf8\x2a\xf8", 4);
  refuse(jpeg, {"11000 x 11000 pixels in a file of", "damaged"});
  std::string png = png_file(picture(8, 8));
  png.replace(16, 8, std::string("\0\0\x2a\xf8\0\0\x2a\xf8", 8));
  png.replace(29, 4,
              test::big_endian(static_cast<uint32_t>(::crc32(
                  0, reinterpret_cast<const Bytef*>(png.data() + 12), 17))));  // of the header's chunk
  refuse(png, {"11000 x 11000 pixels in a file of", "damaged"});
}

// Whatever the bytes are: pixels of the size the header says, or an Error.
TEST(EncodedImage, RandomDamage) {
  std::mt19937 random(1);
  const std::vector<std::string> files = {jpeg_file(picture(20, 30)),    jpeg_file(picture(20, 30), true),
                                          jpeg_file(picture(20, 30, 1)), jpeg_file(picture(9, 9, 4)),
                                          png_file(picture(20, 30)),     png_file(picture(20, 30, 4))};
  int read = 0;
  int refused = 0;
  for (int i = 0; i < 6000; ++i) {
    std::string file = files[static_cast<size_t>(i) % files.size()];
    const int changes = 1 + static_cast<int>(random() % 4);
    for (int c = 0; c < changes; ++c) file[random() % file.size()] = static_cast<char>(random());
    if (random() % 4 == 0) file.resize(random() % file.size());
    if (random() % 8 == 0) file.insert(random() % (file.size() + 1), std::string(random() % 40, '\xff'));
    try {
      const EncodedImage image(bytes_of(file), "a.img");
      // Damage may make the picture large; decoding that is slow, and no other.
      if (image.height() * image.width() > 1 << 20) continue;
      const at::Tensor pixels = image.decode(i % 2 == 0 ? 3 : 1);
      EXPECT_EQ(pixels.size(1), image.height());
      EXPECT_EQ(pixels.size(2), image.width());
      ++read;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("a.img"), std::string::npos);
      ++refused;
    }
  }
  EXPECT_GT(read, 100);
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
