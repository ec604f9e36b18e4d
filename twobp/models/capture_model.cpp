// An entry of the cache is a folder: a bundle, and entry.json, which says what it was made from. It is valid if this
// equals what a new one would be made from.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <system_error>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <torch/headeronly/version.h>

#include "twobp/core/check.h"
#include "twobp/core/random.h"
#include "twobp/core/text.h"
#include "twobp/data/text/python.h"
#include "twobp/files/input_file.h"
#include "twobp/files/new_file.h"
#include "twobp/files/npy.h"
#include "twobp/files/paths.h"
#include "twobp/models/captured.h"
#include "twobp/models/checked_json.h"
#include "twobp/models/hf_config.h"

namespace twobp {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kWhat = "a captured model";
constexpr const char* kEntry = "entry.json";
constexpr const char* kNew = ".new";
constexpr int kFormat = 1;  // increase it when old entries must not be used
constexpr int kEntryDepth = 16;
constexpr double kTimeout = 1800;  // seconds between two signs of life: a large model takes long to load
constexpr uint64_t kMostBytes = uint64_t{4} << 30;  // of entries besides the newest

// The package is that of the environment or, without one, that of the build folder.
constexpr const char* kScript = R"python(
import sys
sys.path[:] = [path for path in sys.path if path] + [sys.argv[1]]  # -c adds the current folder, whose files are not modules
try:
    from twobp.hugging_face import main
except ImportError as error:
    import json
    print(json.dumps({"error": f"{sys.executable} cannot load the Python package twobp ({error}): pip install it there, "
                               "or name another Python in TWOBP_PYTHON"}), flush=True)
    sys.exit(1)
main(sys.argv[2])
)python";

bool is_off() {
  const char* given = std::getenv("TWOBP_CACHE");
  return given != nullptr && std::string(given) == "off";
}

json source_of(const fs::path& directory, const CaptureFields& fields, const std::string& precision) {
  std::map<std::string, std::string> states;
  for (const auto& file : fs::directory_iterator(directory)) {
    std::error_code ignored;
    if (fs::is_regular_file(file, ignored)) states[file.path().filename().string()] = state_of_file(file.path());
  }
  const json source = {{"directory", directory.string()},
                       {"files", states},
                       {"fields", fields},
                       {"precision", precision},
                       {"torch", concat(TORCH_VERSION_MAJOR, '.', TORCH_VERSION_MINOR)},
                       {"format", kFormat}};
  // A name need not be UTF-8, but the JSON text must be.
  return json::parse(source.dump(-1, ' ', false, json::error_handler_t::replace));
}

// Whether the files of the code that made the entry are as they were, where they are still there.
bool same_code(const json& code) {
  if (!code.is_object()) return false;
  return std::all_of(code.items().begin(), code.items().end(), [](const auto& item) {
    std::error_code ignored;
    return !fs::exists(item.key(), ignored) || item.value() == state_of_file(item.key());
  });
}

std::optional<ModelOptions> find_entry(const fs::path& folder, const json& source) {
  try {
    const json entry = read_json_object((folder / kEntry).string(), kEntryDepth);
    if (entry.value("source", json()) != source || !same_code(entry.value("code", json()))) return {};
    ModelOptions options = read_bundle(folder.string());
    std::error_code ignored;
    if (fs::exists(folder / "model.safetensors", ignored)) options.as<CapturedOptions>().weights = folder.string();
    fs::last_write_time(folder / kEntry, fs::file_time_type::clock::now(), ignored);
    return options;
  } catch (const Error&) {  // missing or damaged; it is made again
    return {};
  }
}

json ask_python(const json& request, const std::string& name) {
  PythonProcess python(name, kScript, {TWOBP_BUILD_PACKAGE, request.dump()}, kTimeout);
  for (;;) {
    json answer = json::parse(python.read_line(), nullptr, /*allow_exceptions=*/false);
    TWOBP_CHECK(answer.is_object(), name,
                ": the Python process that captures models returned no JSON object: $TWOBP_PYTHON must ",
                "name a Python interpreter");
    const auto error = answer.find("error");
    if (error != answer.end()) fail(name, ": ", error->is_string() ? error->get<std::string>() : error->dump());
    if (answer.contains("code")) return answer;  // others are signs of life
  }
}

uint64_t bytes_in(const fs::path& folder) {
  uint64_t bytes = 0;
  for (const auto& file : fs::recursive_directory_iterator(folder)) {
    if (file.is_regular_file()) bytes += file.file_size();
  }
  return bytes;
}

// Removes what killed runs left behind, and the entries that were not used for the longest time.
void clean(const fs::path& folder, const fs::path& newest) {
  std::vector<std::pair<fs::file_time_type, fs::path>> entries;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (!entry.is_directory() || entry.path() == newest) continue;
    if (entry.path().extension() == kNew) fs::remove_all(entry.path());
    if (fs::exists(entry.path() / kEntry))
      entries.emplace_back(fs::last_write_time(entry.path() / kEntry), entry.path());
  }
  std::sort(entries.rbegin(), entries.rend());
  uint64_t bytes = 0;
  for (const auto& [time, path] : entries) {
    bytes += bytes_in(path);
    if (bytes > kMostBytes) fs::remove_all(path);
  }
}

// Under a lock. The entry's folder appears when all of it is on disk.
void make_entry(const fs::path& folder, const fs::path& directory, const CaptureFields& fields,
                const std::string& arrays, const std::string& precision, const json& source) {
  const fs::path made = folder.string() + kNew;
  std::error_code ignored;
  fs::remove_all(made, ignored);
  TWOBP_CHECK(fs::create_directory(made, ignored), "cannot keep ", kWhat, ": ", made.string(),
              ": the folder cannot be made: set data.cache to a folder that can be written");
  const std::string name = directory.string();
  try {
    const json answer = ask_python(
        {{"folder", name}, {"fields", fields}, {"arrays", arrays}, {"precision", precision}, {"into", made.string()}},
        name);
    json code = json::object();
    for (const json& path : answer.at("code")) code[path.get<std::string>()] = state_of_file(path.get<std::string>());
    TWOBP_CHECK(source_of(directory, fields, precision) == source, name,
                ": was changed while it was captured: start again when it is complete");
    NewFile entry(made / kEntry);
    entry.write(json{{"source", source}, {"code", code}}.dump(2) + "\n");
    entry.commit();
    fs::remove_all(folder);
    fs::rename(made, folder);
    sync_folder(folder.parent_path());
  } catch (...) {
    fs::remove_all(made, ignored);
    throw;
  }
  try {
    clean(folder.parent_path(), folder);
  } catch (const fs::filesystem_error&) {
    // The entry is made. Whoever makes the next one cleans up.
  }
}

}  // namespace

CaptureFields fields_of_arrays(const std::string& folder, int64_t micro_batch) {
  CaptureFields fields;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    if (entry.path().extension() != ".npy") continue;
    const NpyArray array(entry.path().string());
    std::vector<int64_t> sizes = array.shape();
    TWOBP_CHECK(!sizes.empty() && sizes[0] > 0, array.path(), ": has no samples");
    sizes[0] = micro_batch;
    fields[entry.path().stem().string()] = {array.type() == NpyType::kFloat32 ? "float32" : "int64", sizes};
  }
  TWOBP_CHECK(!fields.empty(), "data.arrays: ", folder, error ? ": " + error.message() : "",
              ": no NAME.npy is there, one for each field of the model");
  return fields;
}

CaptureFields fields_of_tokens(int64_t micro_batch, int64_t sequence) {
  const std::pair<std::string, std::vector<int64_t>> tokens = {"int64", {micro_batch, sequence}};
  return {{"input_ids", tokens}, {"labels", tokens}};
}

bool needs_capture(const std::string& directory) {
  std::error_code ignored;
  const fs::path config = fs::path(directory) / kModelConfig;
  if (is_bundle(directory) || !fs::exists(config, ignored)) return false;
  if (fs::exists(fs::path(directory) / kAdapterConfig, ignored)) return false;
  return !has_layers(config.string());
}

ModelOptions capture_model(const std::string& directory, const CaptureFields& fields, const std::string& arrays,
                           const std::string& precision, const std::string& cache) {
  const fs::path absolute = fs::weakly_canonical(directory);
  const fs::path folder = cache_folder(cache, kWhat) / "models";
  const json source = source_of(absolute, fields, precision);
  const json place = {source["directory"], source["fields"], precision};
  const fs::path entry =
      folder / concat(absolute.filename().string().substr(0, 60), '-', Hash().add(place.dump()).text());
  std::optional<ModelOptions> found;
  if (!is_off()) found = find_entry(entry, source);
  if (!found) {
    const LockedFolder locked(folder, kWhat);
    if (!is_off()) found = find_entry(entry, source);  // the previous holder of the lock may have made it
    if (!found) {
      make_entry(entry, absolute, fields, arrays, precision, source);
      found = find_entry(entry, source);
    }
  }
  if (!found) read_bundle(entry.string());  // says what is wrong with it
  TWOBP_CHECK(found, entry.string(), ": the captured model was changed by another program: start again");
  return *found;
}

}  // namespace twobp
