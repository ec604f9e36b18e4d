// The input is the config.json of a Hugging Face directory. An accepted model must also be writable.
#include "twobp/models/hf_config.h"

#include <nlohmann/json.hpp>

#include "fuzz/input.h"

using namespace twobp;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static fuzz::Folder folder;
  folder.write("config.json", {reinterpret_cast<const char*>(data), size});
  const auto read = fuzz::accepted([&] {
    ModelConfig config;
    config.type = read_hf_config(folder.path());
    return config;
  });
  if (!read) return 0;
  fuzz::require(!hf_config_json(*read, 16, "float32").empty(), "an accepted model cannot be written");
  return 0;
}
