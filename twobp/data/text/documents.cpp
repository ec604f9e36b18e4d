#include "twobp/data/text/documents.h"

#include <algorithm>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/core/json.h"
#include "twobp/core/text.h"
#include "twobp/data/text/python.h"
#include "twobp/files/input_file.h"
#include "twobp/files/paths.h"

namespace twobp {

extern const char* const kParquetScript;  // contents of parquet.py, inserted by CMake

namespace {

using nlohmann::ordered_json;  // a template renders objects, such as the arguments of a call

constexpr int kRecordDepth = 64;
constexpr double kParquetTimeout = 300;
constexpr size_t kMostNames = 100;  // characters of a message
constexpr size_t kLineBuffer = 1 << 20;
constexpr const char* kTools = "tools";  // the field with the tools that a chat's assistant may call

bool has_lines(const std::string& file) {
  const std::string extension = lower_extension(file);
  return extension == ".jsonl" || extension == ".ndjson" || extension == ".jsonlines" || extension == ".jl";
}

bool has_rows(const std::string& file) {
  return lower_extension(file) == ".parquet";
}

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

// The list of tools as JSON, or nothing. Tables often hold it as a text.
std::string tools_of(const ordered_json& value, const std::string& origin) {
  const ordered_json list = value.is_string()
                                ? parse_json<ordered_json>(value.get<std::string>(),
                                                           concat(origin, ": the field \"", kTools, "\""), kRecordDepth)
                                : value;
  TWOBP_CHECK(list.is_array() || list.is_null(), origin, ": the field \"", kTools, "\" of a chat holds ",
              list.type_name(), ", but must hold a list of tools, or such a list as a text of JSON.");
  return list.empty() ? "" : list.dump();
}

// `tools` is the field of that name in the same record.
Document document_of(const ordered_json& value, const ordered_json& tools, const std::string& field,
                     const std::string& origin) {
  if (value.is_string()) return {.text = value.get<std::string>(), .origin = origin};
  TWOBP_CHECK(!value.is_null(), origin, ": the field \"", field,
              "\" holds null: remove the record, or give it a text, which may be empty.");
  TWOBP_CHECK(value.is_array(), origin, ": the field \"", field, "\" holds ", value.type_name(),
              ", but must hold a text, or the list of messages of a chat: name another field in data.field.");
  return {.text = value.dump(), .chat = true, .origin = origin, .tools = tools_of(tools, origin)};
}

void read_lines(const std::string& path, const std::string& field, const std::function<void(const Document&)>& visit) {
  const InputFile file(path);
  check_no_other_format(file);
  for_each_line(file, [&](const std::string& line, int64_t number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) return;
    const std::string origin = concat(path, ":", number);
    const ordered_json record = parse_json_object<ordered_json>(line, origin, kRecordDepth);
    const auto found = record.find(field);
    if (found == record.end()) {
      std::string names;
      for (const auto& [name, value] : record.items()) {
        if (names.size() < kMostNames) names += concat(names.empty() ? ", only " : ", ", name.substr(0, kMostNames));
      }
      fail(origin, ": has no field \"", field, "\"", names, ": name one in data.field.");
    }
    visit(document_of(*found, record.value(kTools, ordered_json()), field, origin));
  });
}

void read_rows(const std::string& path, const std::string& field, const std::function<void(const Document&)>& visit) {
  PythonProcess python(path, kParquetScript, {path, field, kTools}, kParquetTimeout);
  for (int64_t row = 1;; ++row) {
    const ordered_json values = ordered_json::parse(python.read_line(), nullptr, /*allow_exceptions=*/false);
    if (values.is_object() && values.contains("rows")) return;
    if (values.is_object() && values.contains("error")) fail(path, ": ", values["error"].get<std::string>());
    TWOBP_CHECK(values.is_array() && values.size() == 2, path, ": the Python half gave no valid row.");
    visit(document_of(values[0], values[1], field, concat(path, ", row ", row)));
  }
}

constexpr size_t kBlock = 1 << 20;
constexpr size_t kLongestCharacter = 4;

// Index of the first byte that begins no character of a text, or the length of the text.
size_t end_of_text(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const Character one = first_character(text.substr(at));
    if (one.bytes == 0 || one.code == 0) return at;
    at += one.bytes;
  }
  return text.size();
}

}  // namespace

bool has_records(const std::string& file) {
  return has_lines(file) || has_rows(file);
}

void for_each_document(const std::vector<std::string>& files, const std::string& field,
                       const std::function<void(const Document&)>& visit) {
  for (const std::string& path : files) {
    if (has_lines(path)) {
      read_lines(path, field, visit);
    } else if (has_rows(path)) {
      read_rows(path, field, visit);
    } else {
      const InputFile file(path);
      check_text(file);
      std::string text(file.size(), 0);
      file.read(0, text.data(), text.size());
      visit({.text = std::move(text), .origin = path});
    }
  }
}

void check_no_other_format(const InputFile& file) {
  const KnownFormat* format = known_format(file);
  TWOBP_CHECK(format == nullptr, "data.text: ", file.path(), " ", format->is, ": ", format->as_text);
}

void check_text(const InputFile& file) {
  TWOBP_CHECK(lower_extension(file.path()) != ".json", "data.text: ", file.path(),
              " would be read as a text with all its syntax: write each document as a line of a .jsonl file, or "
              "give the name another ending if the syntax is the text.");
  check_no_other_format(file);
  std::string block;
  for (size_t begin = 0; begin < file.size();) {
    block.resize(std::min(kBlock, file.size() - begin));
    file.read(begin, block.data(), block.size());
    const size_t end = end_of_text(block);
    const bool cut = block.size() - end < kLongestCharacter && begin + block.size() < file.size();
    TWOBP_CHECK(end == block.size() || (cut && end > 0), file.path(), ": byte ", begin + end,
                block[end] == 0 ? " is zero" : " is not UTF-8",
                ": convert the text, for instance with iconv, or remove it. Data that is no text goes to "
                "data.tokens.");
    begin += end;
  }
}

}  // namespace twobp
