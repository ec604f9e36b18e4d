#include "twobp/files/known_format.h"

#include <algorithm>
#include <array>
#include <string>

namespace twobp {
namespace {

using std::string_view_literals::operator""sv;

constexpr std::string_view kDecompress = "decompress it.";
constexpr std::string_view kConvert = "convert it to UTF-8, for instance with iconv.";
constexpr std::array<KnownFormat, 13> kFormats = {
    {{"\x93NUMPY"sv, "is a NumPy file", "write its numbers alone, with array.tofile(), or use data.arrays.",
      "name its folder in data.arrays."},
     {"PK\3\4"sv, "is a zip or .npz file", "write the numbers alone, with array.tofile().", "unpack it."},
     {"\x1f\x8b\x08"sv, "is compressed by gzip", kDecompress, kDecompress},
     {"\x28\xb5\x2f\xfd"sv, "is compressed by zstd", kDecompress, kDecompress},
     {"\xfd\x37zXZ\0"sv, "is compressed by xz", kDecompress, kDecompress},
     {"BZh91AY&SY"sv, "is compressed by bzip2", kDecompress, kDecompress},
     {"\x04\x22\x4d\x18"sv, "is compressed by lz4", kDecompress, kDecompress},
     {"PAR1"sv, "is a parquet file", "use data.text.", "give its name the ending .parquet."},
     {"ARROW1"sv, "is an Arrow file", "use data.text, with a parquet file.", "write it as a parquet file."},
     {"\x89HDF"sv, "is an HDF5 file", "write its numbers alone, with array.tofile().", "write its text alone."},
     {"MMIDIDX"sv, "is the index of Megatron's token files", "give the .bin file alone.",
      "give the .bin file alone, in data.tokens."},
     {"\xff\xfe"sv, "is a text in UTF-16 or UTF-32", "", kConvert},
     {"\xfe\xff"sv, "is a text in UTF-16", "", kConvert}}};

}  // namespace

const KnownFormat* known_format(const InputFile& file) {
  constexpr size_t kLongest = 16;
  std::string head(std::min(kLongest, file.size()), 0);
  file.read(0, head.data(), head.size());
  const auto* found = std::find_if(kFormats.begin(), kFormats.end(),
                                   [&](const KnownFormat& one) { return head.starts_with(one.mark); });
  return found == kFormats.end() ? nullptr : found;
}

}  // namespace twobp
