// The input is tokenizer.json, a line "%%", and tokenizer_config.json.
#include <algorithm>

#include "fuzz/input.h"
#include "twobp/data/text/masked_dataset.h"

using namespace twobp;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static fuzz::Folder folder;
  const auto files = fuzz::parts(data, size, 2);
  folder.write("tokenizer.json", files[0]);
  folder.write("tokenizer_config.json", files[1]);
  if (files[1].empty()) folder.remove("tokenizer_config.json");
  const auto read = fuzz::accepted([&] { return read_special_tokens(folder.path()); });
  if (!read) return 0;
  for (const int64_t id : {read->begin, read->end, read->mask}) {
    fuzz::require(id >= 0 && std::binary_search(read->all.begin(), read->all.end(), id),
                  "a special token is not in the list of special tokens");
  }
  fuzz::require(read->all.back() < read->vocab || read->all.empty(), "an id is outside the vocabulary");
  return 0;
}
