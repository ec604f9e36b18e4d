#include "twobp/train/checkpoint.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <system_error>
#include <zlib.h>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/train/new_file.h"

namespace twobp {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr int kFormat = 1;
constexpr const char* kStateFile = "state.json";
constexpr std::streamsize kMaxStateBytes = 16 << 20;
constexpr int kMaxDepth = 16;

const std::map<Checkpoint::File, const char*>& file_names() {
  static const std::map<Checkpoint::File, const char*> names = {
      {Checkpoint::File::kWeights, "weights.safetensors"},
      {Checkpoint::File::kOptimizer, "optimizer.safetensors"},
      {Checkpoint::File::kFrozen, "frozen.safetensors"}};
  return names;
}

struct FileFacts {
  uint64_t bytes = 0;
  uint32_t crc = 0;
};

// Read, not mapped: page faults of a thread of low priority would hold up the others'.
FileFacts facts_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  TWOBP_CHECK(file.good(), "cannot read ", path.string(), ": ", std::strerror(errno));
  FileFacts facts;
  std::vector<char> buffer(1 << 20);
  while (file) {
    file.read(buffer.data(), static_cast<std::streamsize>(buffer.size()));
    const auto bytes = static_cast<size_t>(file.gcount());
    facts.crc = crc32_of(buffer.data(), bytes, facts.crc);
    facts.bytes += bytes;
  }
  TWOBP_CHECK(file.eof(), "cannot read ", path.string(), ": ", std::strerror(errno));
  return facts;
}

json state_to_json(const CheckpointState& state) {
  return {{"format", kFormat},
          {"step", state.position.step},
          {"batches", state.position.batches},
          {"gradient_scale", state.position.gradient_scale},
          {"good_steps", state.position.good_steps},
          {"optimizer_steps", state.optimizer_steps},
          {"config", json::parse(state.run.config)},
          {"data", state.run.data},
          {"kernels", state.run.kernels},
          {"order", state.run.order},
          {"files", json::object()}};
}

uint32_t crc_of(const json& value) {
  const std::string text = value.dump();
  return crc32_of(text.data(), text.size());
}

// The "state" of state.json, checked against its checksum.
json read_state(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  TWOBP_CHECK(file.good(), path.string(), " is missing");
  std::string text(static_cast<size_t>(kMaxStateBytes) + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  TWOBP_CHECK(file.gcount() <= kMaxStateBytes, path.string(), " is not a checkpoint's: too large");
  text.resize(static_cast<size_t>(file.gcount()));
  try {
    const json whole = json::parse(text, [&](int depth, json::parse_event_t, json&) {
      TWOBP_CHECK(depth <= kMaxDepth, path.string(), " is not a checkpoint's: nested too deeply");
      return true;
    });
    const json& state = whole.at("state");
    TWOBP_CHECK(state.at("format") == kFormat, path.string(), " is of checkpoint format ",
                state.at("format").dump(), ", this program reads format ", kFormat);
    TWOBP_CHECK(whole.at("crc32") == crc_of(state), path.string(),
                " is damaged: it does not match its checksum");
    return state;
  } catch (const json::exception&) {
    fail(path.string(), " is damaged: not the JSON of a checkpoint");
  }
}

std::string shape_of(const at::Tensor& tensor) {
  return concat(tensor.scalar_type(), " ", tensor.sizes());
}

}  // namespace

uint32_t crc32_of(const void* data, size_t bytes, uint32_t crc) {
  return static_cast<uint32_t>(::crc32_z(crc, static_cast<const Bytef*>(data), bytes));
}

void write_checkpoint(const fs::path& folder, const CheckpointContent& content, const fs::path& frozen_from) {
  std::error_code error;
  TWOBP_CHECK(fs::create_directory(folder, error), "cannot create the folder ", folder.string(), ": ",
              error ? error.message() : "it exists");
  json state = state_to_json(content.state);
  const std::map<Checkpoint::File, const NamedTensors*> parts = {
      {Checkpoint::File::kWeights, &content.weights},
      {Checkpoint::File::kOptimizer, &content.optimizer},
      {Checkpoint::File::kFrozen, &content.frozen}};
  for (const auto& [file, tensors] : parts) {
    if (tensors->empty()) continue;
    const char* name = file_names().at(file);
    const fs::path path = folder / name;
    if (file == Checkpoint::File::kFrozen && !frozen_from.empty()) {
      fs::create_hard_link(frozen_from / name, path, error);
      if (!error) {
        // Not read again: frozen files are large, and this one was checked when it was written or opened.
        state["files"][name] = read_state(frozen_from / kStateFile).at("files").at(name);
        continue;
      }  // a file system without links: a copy
    }
    write_safetensors(path.string(), *tensors, {{"format", "pt"}});
    const FileFacts facts = facts_of(path);
    state["files"][name] = {{"bytes", facts.bytes}, {"crc32", facts.crc}};
  }
  const std::string text = json{{"crc32", crc_of(state)}, {"state", state}}.dump(1) + "\n";
  NewFile file(folder / kStateFile);
  file.write(text.data(), text.size());
  file.commit();
  sync_folder(folder);
}

Checkpoint::Checkpoint(fs::path folder) : folder_(std::move(folder)) {
  const json state = read_state(folder_ / kStateFile);
  try {
    TrainingPosition& position = state_.position;
    position.step = state.at("step").get<int64_t>();
    position.batches = state.at("batches").get<int64_t>();
    position.gradient_scale = state.at("gradient_scale").get<double>();
    position.good_steps = state.at("good_steps").get<int64_t>();
    state_.optimizer_steps = state.at("optimizer_steps").get<int64_t>();
    state_.run = {state.at("config").dump(), state.at("data").get<std::string>(),
                  state.at("kernels").get<std::string>(), state.value("order", "")};
    TWOBP_CHECK(position.step >= 0 && position.batches >= 0 && position.gradient_scale > 0 &&
                    position.good_steps >= 0 && state_.optimizer_steps >= 0,
                folder_.string(), "/", kStateFile, " is damaged: a count out of range");
    for (const auto& [file, name] : file_names()) {
      const auto entry = state.at("files").find(name);
      if (entry == state.at("files").end()) continue;
      const fs::path path = folder_ / name;
      const FileFacts facts = facts_of(path);
      const auto bytes = entry->at("bytes").get<uint64_t>();
      TWOBP_CHECK(facts.bytes == bytes, path.string(), " is damaged: ", facts.bytes, " bytes instead of ",
                  bytes);
      TWOBP_CHECK(facts.crc == entry->at("crc32").get<uint32_t>(), path.string(),
                  " is damaged: it does not match its checksum");
      files_[file] = std::make_unique<SafetensorsFile>(path.string());
    }
  } catch (const json::exception& e) {
    fail(folder_.string(), "/", kStateFile, " is damaged: ", e.what());
  }
}

Checkpoint::~Checkpoint() = default;
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;

void Checkpoint::check_tensors(File file, const NamedTensors& expected) const {
  const std::string where = (folder_ / file_names().at(file)).string();
  const auto found = files_.find(file);
  const std::vector<std::string> there =
      found == files_.end() ? std::vector<std::string>{} : found->second->names();
  for (const auto& [name, tensor] : expected) {
    TWOBP_CHECK(std::find(there.begin(), there.end(), name) != there.end(), where, " has no ", name,
                ", which this run has: it is a checkpoint of another model");
    const at::Tensor saved = found->second->tensor(name);
    TWOBP_CHECK(saved.sizes() == tensor.sizes() && saved.scalar_type() == tensor.scalar_type(), where, ": ",
                name, " is ", shape_of(saved), ", in this run it is ", shape_of(tensor),
                ": it is a checkpoint of another model");
  }
  for (const std::string& name : there) {
    const bool known =
        std::any_of(expected.begin(), expected.end(), [&](const auto& e) { return e.first == name; });
    TWOBP_CHECK(known, where, " has ", name, ", which this run has not: it is a checkpoint of another model");
  }
}

at::Tensor Checkpoint::read(File file, const std::string& name) const {
  return files_.at(file)->tensor(name);
}

}  // namespace twobp
