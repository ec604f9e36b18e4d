// Tests decoding of JPEG and PNG: the pixels are right, and a damaged file gives an Error, nothing worse.
#include "twobp/data/images/encoded_image.h"

#include <cmath>
#include <random>
#include <zlib.h>

#include <gtest/gtest.h>

#include "image_files.h"
#include "twobp/core/check.h"

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

// Returns the largest difference from the pixels of `expected`.
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

TEST(EncodedImage, KnowsTheSizeFromTheHeader) {
  for (const std::string& file : {png_file(picture(13, 21)), jpeg_file(picture(13, 21))}) {
    const EncodedImage image(bytes_of(file), "a.img");
    EXPECT_EQ(image.height(), 13);
    EXPECT_EQ(image.width(), 21);
  }
}

TEST(EncodedImage, ConvertsBetweenGreyAndColours) {
  for (const std::string& file : {png_file(filled(4, 4, {77})), jpeg_file(filled(4, 4, {77}))}) {
    EXPECT_EQ(difference(decode(file, 3), filled(4, 4, {77, 77, 77})), 0);
  }
  const uint8_t luma = 110;  // 0.299 * 200 + 0.587 * 50 + 0.114 * 180, ITU-R BT.601
  EXPECT_EQ(difference(decode(png_file(filled(4, 4, {200, 50, 180})), 1), filled(4, 4, {luma})), 0);
  EXPECT_LE(difference(decode(jpeg_file(filled(4, 4, {200, 50, 180})), 1), filled(4, 4, {luma})), 1);
  expect_error([] { decode(png_file(picture(4, 4)), 2); }, {"1 or 3 channels"});
}

// The expected values are those of Pillow 13.0: Image.open(f).convert("RGB"). Gamma, profiles and transparency change
// nothing.
TEST(EncodedImage, PngHasThePixelsOfPillow) {
  using Chunks = std::vector<std::pair<std::string, std::vector<uint8_t>>>;
  using Bytes = std::vector<uint8_t>;
  const std::vector<uint8_t> palette = {10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120};
  const Chunks linear = {{"gAMA", {0, 1, 0x86, 0xa0}}};
  const auto grey = [](const Bytes& values) {
    Bytes out;
    for (const uint8_t value : values) out.insert(out.end(), 3, value);
    return out;
  };
  struct Case {
    const char* name;
    test::PngHead head;
    Bytes rows;
    Chunks chunks;
    Bytes expected;
  };
  const std::vector<Case> cases = {
      {"gamma", {2, 1}, {0, 200, 100, 50, 10, 20, 30}, linear, {200, 100, 50, 10, 20, 30}},
      {"sRGB and sBIT", {1, 1}, {0, 1, 2, 3}, {{"sBIT", {5, 5, 5}}, {"sRGB", {0}}}, {1, 2, 3}},
      {"damaged profile", {1, 1}, {0, 1, 2, 3}, {{"iCCP", {'x', 0, 0, 1, 2}}}, {1, 2, 3}},
      {"opacity",
       {2, 1, 8, PNG_COLOR_TYPE_RGB_ALPHA},
       {0, 200, 100, 50, 0, 10, 20, 30, 128},
       linear,
       {200, 100, 50, 10, 20, 30}},
      {"grey opacity", {2, 1, 8, PNG_COLOR_TYPE_GRAY_ALPHA}, {0, 200, 0, 10, 128}, {}, grey({200, 10})},
      {"palette", {4, 1, 2, PNG_COLOR_TYPE_PALETTE}, {0, 0b00011011}, {{"PLTE", palette}, {"tRNS", {0, 128}}}, palette},
      {"short palette",
       {4, 1, 2, PNG_COLOR_TYPE_PALETTE},
       {0, 0b00011011},
       {{"PLTE", {palette.begin(), palette.end() - 3}}},
       {10, 20, 30, 40, 50, 60, 70, 80, 90, 0, 0, 0}},
      {"grey of 1 bit", {4, 1, 1, PNG_COLOR_TYPE_GRAY}, {0, 0b01010000}, {{"tRNS", {0, 1}}}, grey({0, 255, 0, 255})},
      {"grey of 2 bits", {4, 1, 2, PNG_COLOR_TYPE_GRAY}, {0, 0b00011011}, linear, grey({0, 85, 170, 255})},
      {"grey of 4 bits", {4, 1, 4, PNG_COLOR_TYPE_GRAY}, {0, 0x01, 0x8f}, {}, grey({0, 17, 136, 255})},
      {"a transparent grey", {2, 1, 8, PNG_COLOR_TYPE_GRAY}, {0, 77, 200}, {{"tRNS", {0, 77}}}, grey({77, 200})},
      {"a transparent colour", {2, 1}, {0, 1, 2, 3, 4, 5, 6}, {{"tRNS", {0, 1, 0, 2, 0, 3}}}, {1, 2, 3, 4, 5, 6}},
      {"16 bits",
       {2, 1, 16},
       {0, 0x12, 0xf0, 0, 0x80, 0xff, 0x80, 0xff, 0xff, 0x7f, 0xff, 1, 1},
       {},
       {18, 0, 255, 255, 127, 1}},
      {"16 bits, opacity",
       {1, 1, 16, PNG_COLOR_TYPE_RGB_ALPHA},
       {0, 0x12, 0xf0, 0, 0x80, 0xff, 0x80, 16, 0},
       linear,
       {18, 0, 255}},
      {"16 bits, grey opacity",
       {2, 1, 16, PNG_COLOR_TYPE_GRAY_ALPHA},
       {0, 0x12, 0xf0, 0, 0, 0xff, 0x80, 0xff, 0xff},
       {},
       grey({18, 255})},
      {"interlaced",
       {2, 2, 8, PNG_COLOR_TYPE_RGB, true},
       {0, 1, 2, 3, 0, 4, 5, 6, 0, 7, 8, 9, 10, 11, 12},
       {},
       {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}},
      {"interlaced grey", {2, 2, 1, PNG_COLOR_TYPE_GRAY, true}, {0, 0x80, 0, 0, 0, 0x40}, {}, grey({255, 0, 0, 255})},
      {"interlaced palette",
       {2, 2, 2, PNG_COLOR_TYPE_PALETTE, true},
       {0, 0x40, 0, 0x80, 0, 0x6c},
       {{"PLTE", palette}},
       {40, 50, 60, 70, 80, 90, 40, 50, 60, 70, 80, 90}},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(one.name);
    const std::string file = test::png_of(one.head, one.rows, one.chunks);
    const Picture expected = {one.head.height, one.head.width, 3, one.expected};
    EXPECT_EQ(difference(decode(file), expected), 0);
    EXPECT_EQ(decode(file, 1).size(0), 1);
  }
  // Pillow clips these values at 255. Other libraries scale them.
  refuse(test::png_of({2, 1, 16, PNG_COLOR_TYPE_GRAY}, {0, 0, 200, 0x12, 0x34}), {"16 bits", "to 8 bits"});
}

std::string from_hex(const std::string& digits) {
  std::string out;
  for (size_t i = 0; i < digits.size(); i += 2) out += static_cast<char>(std::stoi(digits.substr(i, 2), nullptr, 16));
  return out;
}

uint32_t checksum(const at::Tensor& image) {
  const at::Tensor pixels = image.permute({1, 2, 0}).contiguous();
  return static_cast<uint32_t>(::crc32(0, pixels.const_data_ptr<uint8_t>(), static_cast<uInt>(pixels.numel())));
}

// Pillow wrote 17 x 11 pixels with halved colours, in plain and progressive form. The checksums are those of
// Image.open(f).convert("RGB"), and of convert("L") after that.
TEST(EncodedImage, JpegHasThePixelsOfPillow) {
  const char* plain =
      "ffd8ffe000104a46494600010100000100010000ffdb0043000d090a0b0a080d0b0a0b0e0e0d0f13201513121213271c1e17"
      "202e2931302e292d2c333a4a3e333646372c2d405741464c4e525352323e5a615a50604a51524fffdb0043010e0e0e131113"
      "261515264f352d354f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f"
      "4f4f4f4f4f4f4f4fffc0001108000b001103012200021101031101ffc4001600010101000000000000000000000000000500"
      "06ffc4001f1000010206030000000000000000000000000103020405223152131562ffc40017010003010000000000000000"
      "000000000003040506ffc4001b11000105010100000000000000000000000002030511150104ffda000c0301000211031100"
      "3f00125e8f8b4525e938b479869bd5041869bd5027be59c6ee8522a457da33bd5792357c706a8442de78d3e82cffd9";
  const char* progressive =
      "ffd8ffe000104a46494600010100000100010000ffdb0043000d090a0b0a080d0b0a0b0e0e0d0f13201513121213271c1e17"
      "202e2931302e292d2c333a4a3e333646372c2d405741464c4e525352323e5a615a50604a51524fffdb0043010e0e0e131113"
      "261515264f352d354f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f"
      "4f4f4f4f4f4f4f4fffc2001108000b001103012200021101031101ffc4001600010101000000000000000000000000000400"
      "05ffc40017010003010000000000000000000000000002030405ffda000c030100021003100000010a9e824e75ad41a9ffc4"
      "00191000020301000000000000000000000000000102031113ffda00080101000105028d246a3909212461ffc40017110003"
      "010000000000000000000000000000010414ffda0008010301013f0196866867ffc400181100020300000000000000000000"
      "0000000002030414ffda0008010201013f019edb29bdcfffc40014100100000000000000000000000000000020ffda000801"
      "0100063f025fffc4001810010003010000000000000000000000000011516171ffda0008010100013f21c18b85454429ffda"
      "000c03010002000300000010f72fffc400161100030000000000000000000000000000011011ffda0008010301013f103e27"
      "ffc4001511010100000000000000000000000000001110ffda0008010201013f106087ffc400181001000301000000000000"
      "0000000000000010315161ffda0008010100013f10a0a2166331c4ffd9";
  for (const char* digits : {plain, progressive}) {
    EXPECT_EQ(checksum(decode(from_hex(digits))), 0x741cd6fe);
    EXPECT_EQ(checksum(decode(from_hex(digits), 1)), 0x1aeb50e7);
  }
}

// A value of 255 means no ink, as in Adobe's files. Pillow assumes the same for files without Adobe's marker.
TEST(EncodedImage, TurnsInksIntoColours) {
  const std::string file = jpeg_file(filled(8, 8, {255, 128, 0, 255}));
  EXPECT_LE(difference(decode(file), filled(8, 8, {255, 128, 0})), 3);
  EXPECT_LE(difference(decode(jpeg_file(filled(8, 8, {255, 128, 0, 128}))), filled(8, 8, {128, 64, 0})), 3);
  EXPECT_EQ(decode(file, 1).size(0), 1);
  std::string unmarked = file;
  const size_t marker = unmarked.find("\xff\xee");
  ASSERT_NE(marker, std::string::npos);
  unmarked.erase(marker, 2 + 14);
  EXPECT_TRUE(at::equal(decode(unmarked), decode(file)));
}

TEST(EncodedImage, DecodesJpegAtASmallerSize) {
  const std::string file = jpeg_file(picture(70, 100));
  for (const int64_t reduce : {2, 4, 8}) {
    const at::Tensor image = decode(file, 3, reduce);
    EXPECT_EQ(image.size(1), (70 + reduce - 1) / reduce);
    EXPECT_EQ(image.size(2), (100 + reduce - 1) / reduce);
    // Its pixels are means of the whole picture's pixels.
    const double mean = image.to(at::kDouble).mean().item<double>();
    EXPECT_NEAR(mean, decode(file).to(at::kDouble).mean().item<double>(), 3);
  }
  EXPECT_EQ(decode(png_file(picture(70, 100)), 3, 4).size(1), 70);
}

TEST(EncodedImage, RejectsOtherFiles) {
  refuse("", {"empty"});
  refuse("GIF89a", {"neither a JPEG nor a PNG"});
  refuse("\xff\xd8\xff", {"damaged JPEG"});
  refuse(png_file(picture(4, 4)).substr(0, 8), {"damaged PNG"});
}

TEST(EncodedImage, FindsEveryTruncation) {
  for (const bool progressive : {false, true}) {
    const std::string whole = jpeg_file(picture(24, 24), progressive);
    // The last two bytes are the end marker. Every pixel is there without it.
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

TEST(EncodedImage, RefusesHugeSizesBeforeTakingMemory) {
  std::string jpeg = jpeg_file(picture(8, 8));
  const size_t frame = jpeg.find("\xff\xc0");
  ASSERT_NE(frame, std::string::npos);
  jpeg.replace(frame + 5, 4, "\xff\x00\xff\x00", 4);  // 65280 x 65280
  refuse(jpeg, {"65280 x 65280", "more than"});
  // The number of pixels is allowed, but not in so small a file. The header alone must not ask for 360 MB.
  jpeg.replace(frame + 5, 4, "\x2a\xf8\x2a\xf8", 4);
  refuse(jpeg, {"11000 x 11000 pixels in a file of", "damaged"});
  std::string png = png_file(picture(8, 8));
  png.replace(16, 8, std::string("\0\0\x2a\xf8\0\0\x2a\xf8", 8));
  png.replace(29, 4,
              test::big_endian(static_cast<uint32_t>(
                  ::crc32(0, reinterpret_cast<const Bytef*>(png.data() + 12), 17))));  // of the header's chunk
  refuse(png, {"11000 x 11000 pixels in a file of", "damaged"});
}

// Whatever the bytes are, the result has the size in the header, or there is an Error.
TEST(EncodedImage, SurvivesRandomDamage) {
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
      // Damage may make the picture large. Decoding it would only be slow.
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
