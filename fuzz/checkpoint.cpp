// The input is a checkpoint's folder: state.json, the weights and the optimizer state, separated by lines
// "%%". If the state is an object without "crc32", correct checksums are filled in first, because mutations
// cannot guess them.
#include "twobp/train/checkpoint/checkpoint.h"

#include <nlohmann/json.hpp>

#include "fuzz/input.h"
#include "twobp/core/json.h"

using namespace twobp;
using nlohmann::json;

namespace {

uint32_t crc_of(std::string_view text) {
  return crc32_of(text.data(), text.size());
}

// `key` is "state", or "part" for the report of one process.
std::string with_checksums(std::string_view text, const char* key, const std::vector<std::string_view>& files) {
  auto value = fuzz::accepted([&] { return parse_json_object(text, "fuzz", /*max_depth=*/14); });
  if (!value || value->contains("crc32")) return std::string(text);
  size_t at = 1;
  const auto list = value->find("files");
  if (list != value->end() && list->is_object()) {
    for (json& file : *list) {
      if (at < files.size() && file.is_object()) {
        file["bytes"] = files[at].size();
        file["crc32"] = crc_of(files[at]);
      }
      ++at;
    }
  }
  return json{{"crc32", crc_of(value->dump())}, {key, *value}}.dump();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static fuzz::Folder folder;
  const auto files = fuzz::parts(data, size, 3);
  folder.write(kStateFile, with_checksums(files[0], "state", files));
  folder.write("part.json", with_checksums(files[0], "part", files));
  // The parts are in the order of a file list, which is by name.
  folder.write("optimizer.safetensors", files[1]);
  folder.write("weights.safetensors", files[2]);
  fuzz::accepted([&] { return read_part_report(folder.path("part.json")); });
  const auto read = fuzz::accepted([&] { return Checkpoint(folder.path()); });
  const bool whole = problems_of(folder.path()).empty();
  fuzz::require(read || !whole, "a checkpoint cannot be opened, but no problem was found");
  if (!read) return 0;
  fuzz::require(read->processes() >= 1 && read->state().position.step >= 0, "the state is out of range");
  for (const auto file : {CheckpointFile::kWeights, CheckpointFile::kOptimizer, CheckpointFile::kFrozen}) {
    for (const std::string& name : read->names(file)) {
      const auto tensor = fuzz::accepted([&] { return read->read(file, name); });
      fuzz::require(tensor || !whole, "a tensor of a whole checkpoint cannot be read");
    }
  }
  return 0;
}
