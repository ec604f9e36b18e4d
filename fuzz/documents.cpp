// The input is a .jsonl file.
#include "twobp/data/text/documents.h"

#include <nlohmann/json.hpp>

#include "fuzz/input.h"

using namespace twobp;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static fuzz::Folder folder;
  folder.write("a.jsonl", fuzz::text(data, size));
  fuzz::accepted([&] {
    for_each_document({folder.path() + "/a.jsonl"}, "text", [](const Document& document) {
      fuzz::require(document.text.empty() || !nlohmann::json(document.text).dump().empty(), "not UTF-8");
      fuzz::require(!document.chat || nlohmann::json::parse(document.text).is_array(), "a chat is no list");
    });
    return true;
  });
  return 0;
}
