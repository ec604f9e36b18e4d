// The format (numpy.lib.format): "\x93NUMPY", major and minor version, the header's length (2 bytes in 1.0, 4 from 2.0
// on), the header, which is a Python dictionary such as
//   {'descr': '<i8', 'fortran_order': False, 'shape': (3, 256), }
// padded with spaces, then the elements.
#include "twobp/files/npy.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "twobp/core/text.h"

namespace twobp {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr size_t kMaxHeader = 1 << 16;  // NumPy itself refuses more than 10,000 bytes
constexpr size_t kMaxDims = 32;

struct TypeInfo {
  NpyType type;
  std::string_view descr;
  std::string_view name;
  size_t bytes;
};

constexpr std::array<TypeInfo, 5> kTypes = {{
    {NpyType::kUInt8, "|u1", "uint8", 1},
    {NpyType::kUInt16, "<u2", "uint16", 2},
    {NpyType::kInt32, "<i4", "int32", 4},
    {NpyType::kInt64, "<i8", "int64", 8},
    {NpyType::kFloat32, "<f4", "float32", 4},
}};

std::string type_names() {
  std::vector<std::string> names;
  for (const auto& info : kTypes) names.emplace_back(info.name);
  return join(names);
}

// A part of an untrusted header, formatted for a message.
std::string in_quotes(std::string_view text) {
  constexpr size_t kLongest = 40;
  std::string out(text.substr(0, kLongest));
  std::replace_if(
      out.begin(), out.end(), [](unsigned char c) { return c < 0x20 || c > 0x7e; }, '?');
  return concat("'", out, text.size() > kLongest ? "...'" : "'");
}

struct Header {
  std::optional<std::string> descr;
  std::optional<bool> fortran_order;
  std::optional<std::vector<int64_t>> shape;
};

// Parses the dictionary. Accepts only what NumPy writes, and no other Python.
class HeaderParser {
 public:
  HeaderParser(std::string_view text, const std::string& path) : text_(text), path_(path) {}

  Header parse() {
    Header header;
    expect('{');
    while (!accept('}')) {
      const std::string key = string();
      expect(':');
      if (key == "descr") {
        if (!next_is('\'') && !next_is('"')) wrong("'descr' is no plain type: structured arrays are not supported");
        set(header.descr, string(), key);
      } else if (key == "fortran_order") {
        set(header.fortran_order, boolean(), key);
      } else if (key == "shape") {
        set(header.shape, tuple(), key);
      } else {
        wrong(concat("unknown key ", in_quotes(key)));
      }
      if (accept(',')) continue;
      expect('}');
      break;
    }
    skip_space();
    if (at_ != text_.size()) wrong("there is more after the dictionary");
    if (!header.descr || !header.fortran_order || !header.shape) {
      wrong("it lacks 'descr', 'fortran_order' or 'shape'");
    }
    return header;
  }

 private:
  [[noreturn]] void wrong(const std::string& what) const {
    fail(path_, ": bad .npy header at byte ", at_, ": ", what, ".");
  }

  void skip_space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) ++at_;
  }

  bool next_is(char c) {
    skip_space();
    return at_ < text_.size() && text_[at_] == c;
  }

  bool accept(char c) {
    if (!next_is(c)) return false;
    ++at_;
    return true;
  }

  void expect(char c) {
    if (!accept(c)) wrong(concat("expected '", c, "'"));
  }

  std::string string() {
    const char quote = next_is('"') ? '"' : '\'';
    expect(quote);
    const size_t end = text_.find(quote, at_);
    if (end == std::string_view::npos) wrong("a text does not end");
    const std::string value(text_.substr(at_, end - at_));
    at_ = end + 1;
    return value;
  }

  bool boolean() {
    skip_space();
    for (const bool value : {false, true}) {
      const std::string_view word = value ? "True" : "False";
      if (text_.substr(at_, word.size()) != word) continue;
      at_ += word.size();
      return value;
    }
    wrong("expected True or False");
  }

  std::vector<int64_t> tuple() {
    std::vector<int64_t> values;
    expect('(');
    while (!accept(')')) {
      if (values.size() == kMaxDims) wrong("more than 32 dimensions");
      values.push_back(integer());
      if (accept(',')) continue;
      expect(')');
      break;
    }
    return values;
  }

  int64_t integer() {
    skip_space();
    const size_t begin = at_;
    int64_t value = 0;
    for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
      if (__builtin_mul_overflow(value, int64_t{10}, &value) ||
          __builtin_add_overflow(value, int64_t{text_[at_] - '0'}, &value)) {
        wrong("a dimension does not fit into 64 bits");
      }
    }
    if (at_ == begin) wrong("expected a dimension, a whole number of 0 or more");
    return value;
  }

  template <typename T>
  void set(std::optional<T>& to, T value, const std::string& key) const {
    if (to) wrong(concat(in_quotes(key), " is there twice"));
    to = std::move(value);
  }

  std::string_view text_;
  const std::string& path_;
  size_t at_ = 0;
};

const TypeInfo& find_type(const std::string& descr, const std::string& path) {
  TWOBP_CHECK(descr.empty() || descr[0] != '>', path, ": big-endian elements (", in_quotes(descr),
              "): save the array with a little-endian type, for instance array.astype('<i8').");
  const auto found = std::find_if(kTypes.begin(), kTypes.end(), [&](const TypeInfo& info) {
    // A single byte has no byte order, but some writers use '<u1'.
    return info.descr == descr || (info.bytes == 1 && descr.size() == 3 && descr[0] == '<' &&
                                   info.descr.substr(1) == std::string_view(descr).substr(1));
  });
  TWOBP_CHECK(found != kTypes.end(), path, ": elements of type ", in_quotes(descr), " are not supported: save it as ",
              type_names(), ".");
  return *found;
}

uint32_t little_endian(std::span<const uint8_t> bytes) {
  uint32_t value = 0;
  for (size_t i = bytes.size(); i-- > 0;) value = value << 8 | bytes[i];
  return value;
}

}  // namespace

std::string npy_type_name(NpyType type) {
  for (const auto& info : kTypes) {
    if (info.type == type) return std::string(info.name);
  }
  fail("npy_type_name: unknown type ", static_cast<int>(type), ".");
}

NpyArray::NpyArray(const std::string& path) : file_(path) {
  const size_t size = file_.size();
  std::array<uint8_t, 12> begin{};
  file_.read(0, begin.data(), std::min(size, begin.size()));
  const std::span<const uint8_t> bytes(begin.data(), std::min(size, begin.size()));
  const size_t version_end = kMagic.size() + 2;
  TWOBP_CHECK(bytes.size() >= version_end && std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) == 0, path,
              ": not a .npy file (", size, " bytes, without NumPy's signature): write it with numpy.save.");
  const int major = bytes[kMagic.size()];
  const int minor = bytes[kMagic.size() + 1];
  TWOBP_CHECK(major >= 1 && major <= 3 && minor == 0, path, ": .npy format ", major, ".", minor,
              " is unknown: 1.0, 2.0 and 3.0 are read.");

  const size_t length_bytes = major == 1 ? 2 : 4;
  const size_t header_begin = version_end + length_bytes;
  TWOBP_CHECK(size >= header_begin, path, ": truncated: ends within the .npy header.");
  const size_t header_length = little_endian(bytes.subspan(version_end, length_bytes));
  TWOBP_CHECK(header_length <= kMaxHeader, path, ": the .npy header claims ", header_length, " bytes, more than the ",
              kMaxHeader, " allowed: the file is damaged.");
  TWOBP_CHECK(header_length <= size - header_begin, path, ": truncated: the .npy header claims ", header_length,
              " bytes, but only ", size - header_begin, " follow.");

  std::string header_text(header_length, '\0');
  file_.read(header_begin, header_text.data(), header_length);
  Header header = HeaderParser(header_text, path).parse();
  const TypeInfo& info = find_type(*header.descr, path);
  TWOBP_CHECK(!*header.fortran_order, path,
              ": the array is in Fortran order: save numpy.ascontiguousarray(array) instead.");
  type_ = info.type;
  shape_ = std::move(*header.shape);
  offset_ = header_begin + header_length;

  elements_ = 1;
  int64_t data_bytes = 0;
  bool overflow = false;
  for (const int64_t size : shape_) overflow |= __builtin_mul_overflow(elements_, size, &elements_);
  overflow |= __builtin_mul_overflow(elements_, static_cast<int64_t>(info.bytes), &data_bytes);
  TWOBP_CHECK(!overflow, path, ": shape ", shape_text(shape_), " of ", info.name,
              " needs more bytes than 64 bits count.");
  TWOBP_CHECK(static_cast<size_t>(data_bytes) == size - offset_, path, ": shape ", shape_text(shape_), " of ",
              info.name, " needs ", data_bytes, " bytes, but ", size - offset_,
              " follow the header: the file is truncated or damaged.");
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::vector<std::string> sizes;
  for (const int64_t size : shape) sizes.push_back(std::to_string(size));
  return concat("(", join(sizes), shape.size() == 1 ? ",)" : ")");
}

}  // namespace twobp
