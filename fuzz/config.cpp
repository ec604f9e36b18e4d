// The input is a configuration. It must be the same after it is printed and read again.
#include "twobp/train/config.h"

#include "fuzz/input.h"

using namespace twobp;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto read = fuzz::accepted([&] { return parse_config(fuzz::text(data, size), "fuzz.json", {}); });
  if (!read) return 0;
  const std::string written = config_to_json(*read);
  const auto again = fuzz::accepted([&] { return parse_config(written, "again.json", {}); });
  fuzz::require(again && config_to_json(*again) == written,
                "a configuration changes when it is printed and read again");
  return 0;
}
