// The input is a token file of the type that the first byte selects. Every sample in it is read.
#include "fuzz/input.h"
#include "twobp/data/text/token_source.h"

using namespace twobp;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr int64_t kVocab = 50000;
  static fuzz::File first;
  static fuzz::File second;
  if (size == 0) return 0;
  const TokenType type = (data[0] & 1) != 0 ? TokenType::kUInt32 : TokenType::kUInt16;
  const int64_t sequence = 1 + (data[0] >> 1);
  const auto files = fuzz::parts(data + 1, size - 1, 2);
  std::vector<std::string> paths = {first.holding(files[0])};
  if (!files[1].empty()) paths.push_back(second.holding(files[1]));
  const auto read =
      fuzz::accepted([&] { return std::make_unique<TokenDataset>("data.tokens", paths, type, sequence, kVocab); });
  if (!read) return 0;
  for (int64_t i = 0; i < (*read)->size(); ++i) {
    const Fields fields = (*read)->read({i}, 0);  // the ids were checked when the files were opened
    const at::Tensor& labels = fields.at("labels");
    fuzz::require(labels.numel() == sequence, "a sample has not the requested length");
    for (int64_t at = 0; at < sequence; ++at) {
      const int64_t id = labels.const_data_ptr<int64_t>()[at];
      fuzz::require(id >= 0 && id < kVocab, "an id is outside the vocabulary");
    }
  }
  return 0;
}
