#include "twobp/files/safetensors.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <string_view>

#include "twobp/core/check.h"
#include "twobp/core/json.h"
#include "twobp/core/text.h"

namespace twobp {
namespace {

using nlohmann::json;

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the reference implementation
constexpr size_t kMaxDimensions = 32;
constexpr int kMaxDepth = 3;
constexpr const char* kMetadata = "__metadata__";

struct Dtype {
  std::string_view name;
  at::ScalarType type;
};

constexpr std::array<Dtype, 10> kDtypes = {{{"F64", at::kDouble},
                                            {"F32", at::kFloat},
                                            {"F16", at::kHalf},
                                            {"BF16", at::kBFloat16},
                                            {"I64", at::kLong},
                                            {"I32", at::kInt},
                                            {"I16", at::kShort},
                                            {"I8", at::kChar},
                                            {"U8", at::kByte},
                                            {"BOOL", at::kBool}}};

std::optional<at::ScalarType> find_dtype(std::string_view name) {
  const auto* found =
      std::find_if(kDtypes.begin(), kDtypes.end(), [&](const Dtype& dtype) { return dtype.name == name; });
  return found == kDtypes.end() ? std::nullopt : std::optional(found->type);
}

std::string dtype_names() {
  std::vector<std::string> names;
  for (const Dtype& dtype : kDtypes) names.emplace_back(dtype.name);
  return join(names);
}

std::string_view dtype_name(at::ScalarType type, const std::string& tensor) {
  const auto* found =
      std::find_if(kDtypes.begin(), kDtypes.end(), [&](const Dtype& dtype) { return dtype.type == type; });
  TWOBP_CHECK(found != kDtypes.end(), tensor, " is ", c10::toString(type),
              ", which safetensors files are not "
              "written with: they have ",
              dtype_names());
  return found->name;
}

// Formats names from the file for messages: at most one line, without control characters for the terminal.
std::string shown(const std::string& name) {
  constexpr size_t kLongest = 100;
  std::string out = name.substr(0, kLongest);
  for (char& c : out) {
    if (static_cast<unsigned char>(c) < ' ' || c == 0x7f) c = '?';
  }
  return '"' + out + (name.size() > kLongest ? "...\"" : "\"");
}

std::string shown(const std::vector<int64_t>& shape) {
  return concat(at::IntArrayRef(shape));
}

// The number of elements times their size, or none if it exceeds 64 bits. All dimensions are checked even if
// one is 0, because their product is a stride.
std::optional<uint64_t> bytes_of(const std::vector<int64_t>& shape, size_t element_size) {
  int64_t bytes = static_cast<int64_t>(element_size);
  bool empty = false;
  for (const int64_t size : shape) {
    if (size == 0) empty = true;
    if (__builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes)) return std::nullopt;
  }
  return empty ? 0 : static_cast<uint64_t>(bytes);
}

uint64_t count(const json& value, const std::string& what) {
  TWOBP_CHECK(value.is_number_unsigned() && value.get<uint64_t>() <= INT64_MAX, what,
              " must be integers from 0 to 2^63 - 1");
  return value.get<uint64_t>();
}

const json& member(const json& object, const char* key, json::value_t type, const std::string& what) {
  const auto found = object.find(key);
  TWOBP_CHECK(found != object.end(), what, " has no ", key);
  TWOBP_CHECK(found->type() == type, what, ": its ", key, " is not ",
              type == json::value_t::string ? "a text" : "a list");
  return *found;
}

}  // namespace

SafetensorsFile::SafetensorsFile(std::string path) : path_(std::move(path)), file_(path_) {
  read_header();
  check_places();
}

void SafetensorsFile::read_header() {
  const uint64_t size = file_.size();
  TWOBP_CHECK(size >= kLengthBytes, path_, ": ", size, " bytes are no safetensors file: empty or truncated");
  uint64_t length = 0;  // little-endian, like all supported machines
  file_.read(0, &length, kLengthBytes);
  TWOBP_CHECK(length <= kMaxHeaderBytes, path_, ": its header claims ", length, " bytes, more than the ",
              kMaxHeaderBytes, " a safetensors file may have: not one, or damaged");
  TWOBP_CHECK(length <= size - kLengthBytes, path_, ": its header claims ", length, " bytes, but ", size - kLengthBytes,
              " follow: truncated, or not a safetensors file");
  data_begin_ = kLengthBytes + length;
  std::string text(length, '\0');
  file_.read(kLengthBytes, text.data(), length);
  TWOBP_CHECK(text.starts_with('{'), path_, ": its header is no JSON object: not a safetensors file");
  const json header = parse_json_object(text, path_, kMaxDepth);

  for (const auto& [name, value] : header.items()) {
    const std::string what = path_ + ": " + shown(name);
    TWOBP_CHECK(value.is_object(), what, " is not described by an object");
    if (name == kMetadata) {
      for (const auto& [key, note] : value.items()) {
        TWOBP_CHECK(note.is_string(), what, ": ", shown(key), " is not a text");
        metadata_[key] = note.get<std::string>();
      }
      continue;
    }
    Entry entry;
    entry.dtype = member(value, "dtype", json::value_t::string, what).get<std::string>();
    const json& shape = member(value, "shape", json::value_t::array, what);
    TWOBP_CHECK(shape.size() <= kMaxDimensions, what, " has ", shape.size(), " dimensions, more than ", kMaxDimensions);
    for (const json& size : shape) {
      entry.shape.push_back(static_cast<int64_t>(count(size, what + ": the numbers in its shape")));
    }
    const json& offsets = member(value, "data_offsets", json::value_t::array, what);
    TWOBP_CHECK(offsets.size() == 2, what, ": its data_offsets are not two numbers");
    entry.begin = count(offsets[0], what + ": its data_offsets");
    entry.end = count(offsets[1], what + ": its data_offsets");
    if (const auto dtype = find_dtype(entry.dtype)) {
      const auto needed = bytes_of(entry.shape, c10::elementSize(*dtype));
      TWOBP_CHECK(needed, what, ": its shape ", shown(entry.shape), " means more bytes than 64 bits count");
      TWOBP_CHECK(entry.begin <= entry.end && entry.end - entry.begin == *needed, what, ": its shape ",
                  shown(entry.shape), " of ", entry.dtype, " needs ", *needed, " bytes, its data_offsets are ",
                  entry.begin, " and ", entry.end);
    }
    entries_.emplace(name, std::move(entry));
  }
}

void SafetensorsFile::check_places() const {
  const uint64_t size = file_.size() - data_begin_;
  std::vector<const std::pair<const std::string, Entry>*> order;
  for (const auto& item : entries_) order.push_back(&item);
  std::sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return std::pair(a->second.begin, a->second.end) < std::pair(b->second.begin, b->second.end);
  });
  uint64_t at = 0;
  for (const auto* item : order) {
    const Entry& entry = item->second;
    TWOBP_CHECK(entry.begin <= entry.end && entry.end <= size, path_, ": ", shown(item->first), " lies at bytes ",
                entry.begin, " to ", entry.end, " of the data, which has ", size, ": truncated or damaged");
    TWOBP_CHECK(entry.begin >= at, path_, ": ", shown(item->first), " begins at byte ", entry.begin,
                " of the data, where another tensor is until ", at, ": tensors overlap");
    TWOBP_CHECK(entry.begin == at, path_, ": bytes ", at, " to ", entry.begin, " of the data belong to no tensor");
    at = entry.end;
  }
  TWOBP_CHECK(at == size, path_, ": bytes ", at, " to ", size, " of the data belong to no tensor");
}

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : entries_) names.push_back(name);
  return names;
}

const SafetensorsFile::Entry& SafetensorsFile::entry(const std::string& name) const {
  const auto found = entries_.find(name);
  TWOBP_CHECK(found != entries_.end(), path_, ": there is no tensor ", shown(name));
  return found->second;
}

at::ScalarType SafetensorsFile::type(const std::string& name) const {
  const Entry& e = entry(name);
  const auto dtype = find_dtype(e.dtype);
  TWOBP_CHECK(dtype, path_, ": ", shown(name), " has dtype ", shown(e.dtype),
              ", which is not supported: ", dtype_names(), " are");
  return *dtype;
}

at::Tensor SafetensorsFile::tensor(const std::string& name) const {
  const Entry& e = entry(name);
  const at::ScalarType dtype = type(name);
  // A byte of a BOOL may have any value, but a C++ bool only 0 or 1.
  at::Tensor out = at::empty(e.shape, at::TensorOptions().dtype(dtype == at::kBool ? at::kByte : dtype));
  if (e.end > e.begin) file_.read(data_begin_ + e.begin, out.mutable_data_ptr(), e.end - e.begin);
  return dtype == at::kBool ? out.ne(0) : out;
}

at::ScalarType StoredTypes::of(const std::string& name, const at::Tensor& tensor) const {
  const at::ScalarType own = tensor.scalar_type();
  if (!floats || !at::isFloatingType(own)) return own;
  return in_float32.contains(name) ? at::kFloat : *floats;
}

int64_t StoredTypes::bytes_of(const std::string& name, const at::Tensor& tensor) const {
  return tensor.numel() * static_cast<int64_t>(c10::elementSize(of(name, tensor)));
}

void write_safetensors(NewFile& file, const NamedTensors& tensors, const std::map<std::string, std::string>& metadata,
                       const StoredTypes& types) {
  // Large elements come first, so that every tensor is aligned.
  std::vector<size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), 0);
  const auto stored = [&](size_t i) { return types.of(tensors[i].first, tensors[i].second); };
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return c10::elementSize(stored(a)) > c10::elementSize(stored(b)); });

  json header = json::object();
  if (!metadata.empty()) header[kMetadata] = metadata;
  uint64_t offset = 0;
  for (const size_t i : order) {
    const auto& [name, tensor] = tensors[i];
    TWOBP_CHECK(name != kMetadata && !header.contains(name), file.path().string(), ": two tensors are called ", name);
    const auto bytes = static_cast<uint64_t>(types.bytes_of(name, tensor));
    header[name] = {{"dtype", dtype_name(stored(i), name)},
                    {"shape", tensor.sizes().vec()},
                    {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const json::exception&) {
    fail(file.path().string(), ": a tensor's name or the metadata is not UTF-8");
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');  // aligns the data
  TWOBP_CHECK(text.size() <= kMaxHeaderBytes, file.path().string(), ": too many tensors for one file");
  const uint64_t length = text.size();  // little-endian, like all supported machines
  file.write(&length, sizeof(length));
  file.write(text);
  for (const size_t i : order) {
    const at::Tensor& given = tensors[i].second;
    const at::Tensor tensor = given.to(at::kCPU, stored(i)).contiguous();
    TWOBP_CHECK(tensor.scalar_type() == given.scalar_type() || only_finite(tensor) || !only_finite(given),
                file.path().string(), ": ", tensors[i].first, " has a value of ", given.abs().max().item<double>(),
                ", beyond the range of ", c10::toString(stored(i)), ": save it in float32");
    file.write(tensor.const_data_ptr(), tensor.nbytes());
  }
}

void write_safetensors(const std::string& path, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata, const StoredTypes& types) {
  NewFile file(path);
  write_safetensors(file, tensors, metadata, types);
  file.commit();
}

bool only_finite(const at::Tensor& tensor) {
  if (tensor.numel() == 0 || !at::isFloatingType(tensor.scalar_type())) return true;
  const auto [least, most] = at::aminmax(tensor);  // both are NaN if an element is
  return std::isfinite(least.item<double>()) && std::isfinite(most.item<double>());
}

}  // namespace twobp
