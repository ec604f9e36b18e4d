#include "twobp/data/text/documents.h"

#include <algorithm>
#include <string_view>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/core/json_text.h"
#include "twobp/data/text/python.h"
#include "twobp/files/input_file.h"
#include "twobp/files/json_file.h"

namespace twobp {

extern const char* const kParquetScript;  // contents of parquet.py, inserted by CMake

namespace {

using nlohmann::json;

constexpr int kRecordDepth = 64;
constexpr double kParquetTimeout = 300;
constexpr size_t kMostNames = 100;  // characters of a message
constexpr size_t kLineBuffer = 1 << 20;

// Calls visit(line, number), numbers counted from 1. The last line may lack its newline.
template <typename Visit>
void for_each_line(const InputFile& file, const Visit& visit) {
  std::string rest;
  std::string buffer;
  int64_t number = 0;
  for (size_t begin = 0; begin < file.size(); begin += buffer.size()) {
    buffer.resize(std::min(kLineBuffer, file.size() - begin));
    file.read(begin, buffer.data(), buffer.size());
    std::string_view text = buffer;
    for (size_t end = text.find('\n'); end != std::string_view::npos; end = text.find('\n')) {
      rest += text.substr(0, end);
      visit(rest, ++number);
      rest.clear();
      text.remove_prefix(end + 1);
    }
    rest += text;
  }
  if (!rest.empty()) visit(rest, ++number);
}

Document document_of(const json& value, const std::string& field, const std::string& origin) {
  if (value.is_string()) return {value.get<std::string>(), false, origin};
  TWOBP_CHECK(value.is_array(), origin, ": the field \"", field, "\" holds ", value.type_name(),
              ", but must hold a text, or the list of messages of a chat: name another field in data.field.");
  return {value.dump(), true, origin};
}

void read_lines(const std::string& path, const std::string& field,
                const std::function<void(const Document&)>& visit) {
  for_each_line(InputFile(path), [&](const std::string& line, int64_t number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) return;
    const std::string origin = concat(path, ":", number);
    const json record = parse_json_object(line, origin, kRecordDepth);
    const auto found = record.find(field);
    if (found == record.end()) {
      std::string names;
      for (const auto& [name, value] : record.items()) {
        if (names.size() < kMostNames)
          names += concat(names.empty() ? ", only " : ", ", name.substr(0, kMostNames));
      }
      fail(origin, ": has no field \"", field, "\"", names, ": name one in data.field.");
    }
    visit(document_of(*found, field, origin));
  });
}

void read_rows(const std::string& path, const std::string& field,
               const std::function<void(const Document&)>& visit) {
  PythonProcess python(path, kParquetScript, {path, field}, kParquetTimeout);
  for (int64_t row = 1;; ++row) {
    const json value = json::parse(python.read_line(), nullptr, /*allow_exceptions=*/false);
    if (value.is_object() && value.contains("rows")) return;
    if (value.is_object() && value.contains("error")) fail(path, ": ", value["error"].get<std::string>());
    visit(document_of(value, field, concat(path, ", row ", row)));
  }
}

}  // namespace

bool has_records(const std::string& file) {
  return file.ends_with(".jsonl") || file.ends_with(".parquet");
}

void for_each_document(const std::vector<std::string>& files, const std::string& field,
                       const std::function<void(const Document&)>& visit) {
  for (const std::string& path : files) {
    if (path.ends_with(".jsonl")) {
      read_lines(path, field, visit);
    } else if (path.ends_with(".parquet")) {
      read_rows(path, field, visit);
    } else {
      const std::vector<uint8_t> bytes = read_whole_file(path);
      visit({std::string(bytes.begin(), bytes.end()), false, path});
    }
  }
}

}  // namespace twobp
