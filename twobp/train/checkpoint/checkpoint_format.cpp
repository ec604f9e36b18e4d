#include "twobp/train/checkpoint/checkpoint_format.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <vector>
#include <zlib.h>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/files/input_file.h"
#include "twobp/files/new_file.h"
#include "twobp/transport/world.h"

namespace twobp {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr uint64_t kMaxStateBytes = 16 << 20;
constexpr int kMaxDepth = 16;

constexpr std::array<std::pair<CheckpointFile, const char*>, 3> kKinds = {{{CheckpointFile::kWeights, "weights"},
                                                                           {CheckpointFile::kOptimizer, "optimizer"},
                                                                           {CheckpointFile::kFrozen, "frozen"}}};

// "-00001-of-00004", or "" for one process.
std::string part_suffix(const CheckpointPart& part) {
  if (part.count == 1) return "";
  std::array<char, 48> text{};
  std::snprintf(text.data(), text.size(), "-%05d-of-%05d", part.process, part.count);
  return text.data();
}

uint32_t crc_of(const json& value) {
  const std::string text = value.dump();
  return crc32_of(text.data(), text.size());
}

// {"crc32": of the value, `key`: value}.
void write_checked(const fs::path& path, const char* key, const json& value) {
  NewFile file(path);
  file.write(json{{"crc32", crc_of(value)}, {key, value}}.dump(1) + "\n");
  file.commit();
}

// The value under `key`, checked against its checksum.
json read_checked(const fs::path& path, const char* key) {
  TWOBP_CHECK(fs::exists(path), path.string(), " is missing");
  const std::string text = read_text(path.string(), kMaxStateBytes);
  try {
    const json whole = json::parse(text, [&](int depth, json::parse_event_t, json&) {
      TWOBP_CHECK(depth <= kMaxDepth, path.string(), " is not a file of a checkpoint: nested too deeply");
      return true;
    });
    const json& value = whole.at(key);
    const json& format = value.at("format");
    TWOBP_CHECK(format.is_number_integer() && format >= 1 && format <= kCheckpointFormat, path.string(),
                " has checkpoint format ", format.dump(), ", but this program reads formats up to ", kCheckpointFormat,
                ": it needs another version of twobp");
    TWOBP_CHECK(whole.at("crc32") == crc_of(value), path.string(), " is damaged: it does not match its checksum");
    return value;
  } catch (const json::exception&) {
    fail(path.string(), " is damaged: not the JSON of a checkpoint");
  }
}

// Reads a count from untrusted JSON. json::get would accept fractions, negative numbers and numbers that overflow.
int64_t count_of(const json& object, const char* key, const fs::path& path, int64_t most = INT64_MAX) {
  const json& value = object.at(key);
  TWOBP_CHECK(value.is_number_unsigned() && value.get<uint64_t>() <= static_cast<uint64_t>(most), path.string(),
              " is damaged: ", key, " is not a whole number from 0 to ", most);
  return value.get<int64_t>();
}

json files_to_json(const FileList& files) {
  json list = json::object();
  for (const auto& [name, facts] : files) list[name] = {{"bytes", facts.bytes}, {"crc32", facts.crc}};
  return list;
}

FileList files_of(const json& list, const fs::path& path) {
  FileList files;
  for (const auto& [name, facts] : list.items()) {
    TWOBP_CHECK(checkpoint_file_of(name), path.string(), " is damaged: it lists a file that no checkpoint has");
    files[name] = {static_cast<uint64_t>(count_of(facts, "bytes", path)),
                   static_cast<uint32_t>(count_of(facts, "crc32", path, UINT32_MAX))};
  }
  return files;
}

}  // namespace

PieceName parse_piece(const std::string& stored) {
  static const Pattern pattern("(.*)\\[([0-9]{1,18}):([0-9]{1,18})\\]");
  const auto groups = pattern.match(stored);
  if (groups.empty()) return {stored};
  const PieceName piece{groups[1], std::stoll(groups[2]), std::stoll(groups[3])};
  return piece.begin < piece.end ? piece : PieceName{stored};
}

std::string to_string(const PieceName& piece) {
  return piece.whole() ? piece.name : concat(piece.name, '[', piece.begin, ':', piece.end, ']');
}

std::string checkpoint_file_name(CheckpointFile file, const CheckpointPart& part) {
  return kKinds[static_cast<size_t>(file)].second + part_suffix(part) + ".safetensors";
}

std::optional<CheckpointFile> checkpoint_file_of(const std::string& name) {
  static const Pattern pattern("([a-z]+)(-[0-9]{5,9}-of-[0-9]{5,9})?\\.safetensors");
  if (name.size() > 64) return std::nullopt;
  const auto groups = pattern.match(name);
  if (groups.empty()) return std::nullopt;
  for (const auto& [file, kind] : kKinds) {
    if (groups[1] == kind) return file;
  }
  return std::nullopt;
}

std::string part_file_name(const CheckpointPart& part) {
  return "part" + part_suffix(part) + ".json";
}

uint32_t crc32_of(const void* data, size_t bytes, uint32_t crc) {
  return static_cast<uint32_t>(::crc32_z(crc, static_cast<const Bytef*>(data), bytes));
}

// Reads the file instead of mapping it, because page faults of a low-priority thread would block the other threads.
FileFacts facts_of(const fs::path& path) {
  const InputFile file(path.string());
  FileFacts facts;
  std::vector<char> buffer(1 << 16);
  while (facts.bytes < file.size()) {
    const size_t bytes = std::min(buffer.size(), file.size() - facts.bytes);
    file.read(facts.bytes, buffer.data(), bytes);
    facts.crc = crc32_of(buffer.data(), bytes, facts.crc);
    facts.bytes += bytes;
  }
  return facts;
}

void write_state(const fs::path& path, const CheckpointState& state, const FileList& files) {
  write_checked(path, "state",
                {{"format", kCheckpointFormat},
                 {"step", state.position.step},
                 {"batches", state.position.batches},
                 {"gradient_scale", state.position.loss_scale},
                 {"good_steps", state.position.good_steps},
                 {"optimizer_steps", state.optimizer_steps},
                 {"config", json::parse(state.run.config)},
                 {"data", state.run.data},
                 {"kernels", state.run.kernels},
                 {"order", state.run.order},
                 {"files", files_to_json(files)}});
}

StateAndFiles read_state(const fs::path& path) {
  const json state = read_checked(path, "state");
  try {
    StateAndFiles read;
    read.format = state.at("format").get<int>();
    TrainingPosition& position = read.state.position;
    position.step = count_of(state, "step", path);
    position.batches = count_of(state, "batches", path);
    position.loss_scale = state.at("gradient_scale").get<double>();
    position.good_steps = count_of(state, "good_steps", path);
    read.state.optimizer_steps = count_of(state, "optimizer_steps", path);
    read.state.run = {state.at("config").dump(), state.at("data").get<std::string>(),
                      state.at("kernels").get<std::string>(), state.value("order", "")};
    TWOBP_CHECK(position.loss_scale > 0, path.string(), " is damaged: gradient_scale is not above 0");
    read.files = files_of(state.at("files"), path);
    return read;
  } catch (const json::exception& e) {
    fail(path.string(), " is damaged: ", e.what());
  }
}

void write_part_report(const fs::path& path, const PartReport& report) {
  write_checked(path, "part",
                {{"format", kCheckpointFormat},
                 {"step", report.step},
                 {"process", report.part.process},
                 {"processes", report.part.count},
                 {"error", report.error},
                 {"files", files_to_json(report.files)}});
}

PartReport read_part_report(const fs::path& path) {
  const json part = read_checked(path, "part");
  try {
    PartReport report;
    report.step = count_of(part, "step", path);
    report.part = {static_cast<int>(count_of(part, "process", path, INT32_MAX)),
                   static_cast<int>(count_of(part, "processes", path, INT32_MAX))};
    report.error = part.at("error").get<std::string>();
    report.files = files_of(part.at("files"), path);
    return report;
  } catch (const json::exception& e) {
    fail(path.string(), " is damaged: ", e.what());
  }
}

}  // namespace twobp
