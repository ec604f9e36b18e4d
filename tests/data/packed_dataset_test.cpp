// Tests documents packed into samples: no token is lost, no document is cut unless asked for, and none sees
// another.
#include "twobp/data/text/packed_dataset.h"

#include <map>
#include <numeric>

#include <gtest/gtest.h>

#include "tokenizer_files.h"
#include "twobp/core/random.h"
#include "twobp/data/data.h"
#include "twobp/data/text/token_source.h"

namespace twobp::TWOBP_FILE {
namespace {

using test::expect_error;
using test::TempFolder;
using Numbers = std::vector<int64_t>;

Numbers row_of(const Fields& fields, const std::string& name, int64_t row) {
  const at::Tensor one = fields.at(name)[row].contiguous();
  return {one.const_data_ptr<int64_t>(), one.const_data_ptr<int64_t>() + one.numel()};
}

std::shared_ptr<const DocumentTokens> documents(const std::vector<std::string>& texts) {
  auto row = std::make_shared<DocumentTokens>();
  std::string bytes;
  for (const std::string& text : texts) {
    bytes += text;
    row->ends.push_back(static_cast<int64_t>(bytes.size()));
  }
  row->tokens = std::make_shared<ByteSource>(bytes);
  return row;
}

Fields all_of(const PackedDataset& data) {
  Numbers indices(static_cast<size_t>(data.size()));
  std::iota(indices.begin(), indices.end(), 0);
  return data.read(indices, 0);
}

constexpr int64_t kNone = kIgnoredLabel;

TEST(PackedDataset, PacksWholeDocuments) {
  const auto row = documents({"abc", "ABCDE", "xy", "f"});
  const PackedDataset data(row, 0, 4, Packing::kWhole, 6);
  ASSERT_EQ(data.size(), 2);
  const Fields fields = all_of(data);
  EXPECT_EQ(row_of(fields, "input_ids", 0), (Numbers{'a', 'b', 'c', 'x', 'y', 'f'}));
  EXPECT_EQ(row_of(fields, "labels", 0), (Numbers{'b', 'c', kNone, 'y', kNone, kNone}));
  EXPECT_EQ(row_of(fields, kDocumentStarts, 0), (Numbers{0, 0, 0, 3, 3, 5}));
  EXPECT_EQ(row_of(fields, "input_ids", 1), (Numbers{'A', 'B', 'C', 'D', 'E', 0}));
  EXPECT_EQ(row_of(fields, "labels", 1), (Numbers{'B', 'C', 'D', 'E', kNone, kNone}));
  EXPECT_EQ(row_of(fields, kDocumentStarts, 1), (Numbers{0, 0, 0, 0, 0, 5}));
  EXPECT_EQ(data.cost(0), 3 * 3 + 2 * 2 + 1);
  EXPECT_EQ(data.cost(1), 5 * 5);
}

TEST(PackedDataset, SplitsDocuments) {
  const auto row = documents({"abc", "ABCDE", "xyz"});
  const PackedDataset data(row, 0, 3, Packing::kSplit, 4);
  ASSERT_EQ(data.size(), 2);  // three tokens are left out
  const Fields fields = all_of(data);
  EXPECT_EQ(row_of(fields, "input_ids", 0), (Numbers{'a', 'b', 'c', 'A'}));
  EXPECT_EQ(row_of(fields, "labels", 0), (Numbers{'b', 'c', kNone, 'B'}))
      << "the label of the last position is in the next sample";
  EXPECT_EQ(row_of(fields, kDocumentStarts, 0), (Numbers{0, 0, 0, 3}));
  EXPECT_EQ(row_of(fields, "input_ids", 1), (Numbers{'B', 'C', 'D', 'E'}));
  EXPECT_EQ(row_of(fields, "labels", 1), (Numbers{'C', 'D', 'E', kNone}));
  EXPECT_EQ(row_of(fields, kDocumentStarts, 1), (Numbers{0, 0, 0, 0}));
  EXPECT_EQ(data.cost(0), 3 * 3 + 1);
}

TEST(PackedDataset, PadsWithoutPacking) {
  const PackedDataset data(documents({"abc", "A"}), 0, 2, Packing::kNone, 4);
  const Fields fields = all_of(data);
  EXPECT_EQ(row_of(fields, "input_ids", 0), (Numbers{'a', 'b', 'c', 0}));
  EXPECT_EQ(row_of(fields, "labels", 0), (Numbers{'b', 'c', kNone, kNone}));
  EXPECT_EQ(row_of(fields, "labels", 1), (Numbers{kNone, kNone, kNone, kNone}));
  EXPECT_EQ(fields.count(kDocumentStarts), 0u) << "a causal model needs none";
  EXPECT_EQ(data.cost(0), data.cost(1));
}

TEST(PackedDataset, TargetsOnlyTheChosenTokens) {
  const TempFolder folder;
  auto row = std::make_shared<DocumentTokens>(*documents({"abcd", "xy"}));
  row->targets = std::make_shared<InputFile>(folder.write("targets", std::string("\0\0\1\1\1\0", 6)));
  for (const Packing packing : {Packing::kWhole, Packing::kSplit}) {
    const PackedDataset data(row, 0, 2, packing, 6);
    EXPECT_EQ(row_of(all_of(data), "labels", 0), (Numbers{kNone, 'c', 'd', kNone, kNone, kNone}));
  }
}

// The test packs random documents in every way. Every token is there once. Every token except the first of
// its document is a target once.
TEST(PackedDataset, LosesNothingAndCrossesNothing) {
  SplitMix64 random(1);
  for (int round = 0; round < 60; ++round) {
    const auto sequence = static_cast<int64_t>(1 + bounded(random, 12));
    std::vector<std::string> texts(1 + bounded(random, 20));
    std::map<std::pair<int64_t, int64_t>, int> pairs;  // neighbours within a document; all bytes differ
    char next = 1;
    for (std::string& text : texts) {
      for (uint64_t i = 1 + bounded(random, static_cast<uint64_t>(sequence)); i > 0; --i) text += next++;
      for (size_t i = 1; i < text.size(); ++i)
        pairs[{static_cast<unsigned char>(text[i - 1]), static_cast<unsigned char>(text[i])}] = 0;
    }
    const auto last = static_cast<int64_t>(texts.size());
    for (const Packing packing : {Packing::kNone, Packing::kSplit, Packing::kWhole}) {
      const PackedDataset data(documents(texts), 0, last, packing, sequence);
      if (data.size() == 0) continue;
      const Fields fields = all_of(data);
      int64_t tokens = 0;
      for (auto& [pair, seen] : pairs) seen = 0;
      for (int64_t sample = 0; sample < data.size(); ++sample) {
        const Numbers ids = row_of(fields, "input_ids", sample);
        const Numbers labels = row_of(fields, "labels", sample);
        for (size_t i = 0; i < ids.size(); ++i) {
          tokens += ids[i] != 0 ? 1 : 0;
          if (labels[i] != kNone) {
            ASSERT_TRUE(pairs.contains({ids[i], labels[i]})) << "crosses";
            ++pairs[{ids[i], labels[i]}];
          }
          if (packing == Packing::kNone) continue;
          const auto start = static_cast<size_t>(row_of(fields, kDocumentStarts, sample)[i]);
          ASSERT_LE(start, i);
          for (size_t j = start; j < i; ++j)
            ASSERT_TRUE(pairs.contains({ids[j], ids[j + 1]})) << "sees another document";
          // A token sees all of its own document: another document precedes the start, or the sample begins
          // there.
          ASSERT_FALSE(start > 0 && ids[start] != 0 && pairs.contains({ids[start - 1], ids[start]}));
        }
      }
      int64_t all = 0;
      for (const std::string& text : texts) all += static_cast<int64_t>(text.size());
      ASSERT_EQ(tokens, packing == Packing::kSplit ? all / sequence * sequence : all);
      for (const auto& [pair, seen] : pairs) ASSERT_LE(seen, 1);
      const auto counted = std::count_if(pairs.begin(), pairs.end(), [](const auto& one) { return one.second == 1; });
      if (packing != Packing::kSplit) {
        ASSERT_EQ(counted, static_cast<ptrdiff_t>(pairs.size()));
      }
    }
  }
}

TEST(BestFit, FillsTheSmallestGap) {
  EXPECT_EQ(best_fit({}, 4), (std::vector<Numbers>{}));
  EXPECT_EQ(best_fit({4, 4}, 4), (std::vector<Numbers>{{0}, {1}}));
  // 7, 5, 3 and 2 open and fill samples of 8. The 3 can only go to the 5, and leaves no room there.
  EXPECT_EQ(best_fit({3, 5, 7, 1, 2}, 8), (std::vector<Numbers>{{0, 1}, {2, 3}, {4}}));
  SplitMix64 random(2);
  Numbers lengths(2000);
  for (int64_t& one : lengths) one = static_cast<int64_t>(1 + bounded(random, 100));
  const int64_t all = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  const auto samples = best_fit(lengths, 128);
  size_t packed = 0;
  for (const Numbers& sample : samples) {
    int64_t filled = 0;
    for (const int64_t document : sample) filled += lengths[static_cast<size_t>(document)];
    EXPECT_LE(filled, 128);
    packed += sample.size();
  }
  EXPECT_EQ(packed, lengths.size());
  EXPECT_LT(static_cast<double>(samples.size()), 1.01 * static_cast<double>(all) / 128 + 1);
}

DataConfig config_of(const std::string& text, const std::string& packing) {
  DataConfig data;
  data.text = text;
  data.packing = packing;
  data.sequence = 8;
  data.held_out = 0;
  return data;
}

ModelInput keeps_apart() {
  ModelInput model;
  model.documents = true;
  return model;
}

std::string lines(const std::vector<std::string>& texts) {
  std::string out;
  for (const std::string& text : texts) out += nlohmann::json{{"text", text}}.dump() + "\n";
  return out;
}

TEST(OpenDocuments, ReadsLinesAsBytes) {
  const TempFolder folder;
  const std::string path = folder.write("a.jsonl", lines({"abc", "", "defgh", "ij", "klmno"}));
  EXPECT_EQ(open_data(config_of(path, "whole"), keeps_apart(), 1).train->size(), 2);
  EXPECT_EQ(open_data(config_of(path, "none"), ModelInput{}, 1).train->size(), 4) << "the empty one is left out";
  DataConfig held_out = config_of(path, "whole");
  held_out.held_out = 0.3;
  const DataSplit split = open_data(held_out, keeps_apart(), 1);
  EXPECT_EQ(row_of(split.held_out->read({0}, 0), "input_ids", 0)[0], 'k') << "documents from the end";
  const DataSplit stream = open_data(config_of(path, "stream"), ModelInput{}, 1);
  ModelInput masked;
  masked.kind = InputKind::kMaskedTokens;
  masked.vocab = kMaskedByteVocab;
  EXPECT_EQ(open_data(config_of(path, "stream"), masked, 1).train->size(), 2) << "two samples of six bytes";
  EXPECT_EQ(row_of(stream.train->read({0}, 0), "input_ids", 0), (Numbers{'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'}));
}

// A captured model shifts the labels itself.
TEST(OpenDocuments, DoesNotShiftLabelsForACapturedModel) {
  const TempFolder folder;
  ModelInput captured;
  captured.kind = InputKind::kFields;
  captured.fields = {{"input_ids", at::kLong, {1, 8}}, {"labels", at::kLong, {1, 8}}};
  const DataConfig data = config_of(folder.write("a.jsonl", lines({"abc", "defg"})), "none");
  const Fields fields = open_data(data, captured, 1).train->read({0}, 0);
  EXPECT_EQ(row_of(fields, "input_ids", 0), (Numbers{'a', 'b', 'c', 0, 0, 0, 0, 0}));
  EXPECT_EQ(row_of(fields, "labels", 0), (Numbers{'a', 'b', 'c', kNone, kNone, kNone, kNone, kNone}));
}

TEST(OpenDocuments, RefusesWhatCannotWork) {
  const TempFolder folder;
  const std::string path = folder.write("a.jsonl", lines({"abc", "012345678", "defghijklmnopqr"}));
  const auto refuse = [&](DataConfig data, const ModelInput& model, const std::vector<std::string>& parts) {
    expect_error([&] { open_data(data, model, 1); }, parts);
  };
  for (const char* packing : {"whole", "none"})
    refuse(
        config_of(path, packing), keeps_apart(),
        {packing, "the document at", "a.jsonl:3 of data.text", "15 tokens", "data.sequence (8)", "1 others", "split"});
  refuse(config_of(folder.write("one.jsonl", lines({"012345678"})), "whole"), keeps_apart(),
         {"one.jsonl:1 of", "data.sequence (8): make"});
  refuse(config_of(path, "split"), ModelInput{}, {"data.packing", "llama", "stream or none"});
  ModelInput masked = keeps_apart();
  masked.kind = InputKind::kMaskedTokens;
  masked.vocab = kMaskedByteVocab;
  refuse(config_of(path, "split"), masked, {"data.packing", "stream"});
  DataConfig long_samples = config_of(path, "split");
  long_samples.sequence = 100;
  refuse(long_samples, keeps_apart(), {"27 tokens", "fewer than one sample", "data.sequence (100)"});
  refuse(config_of(folder.write("e.jsonl", "\n"), "split"), keeps_apart(), {"0 documents", "needed: give more."});
  refuse(config_of(folder.write("c.jsonl", R"({"text": [{"role": "user", "content": "hi"}]})"), "whole"), keeps_apart(),
         {"c.jsonl:1", "is a chat", "data.tokenizer"});
  DataConfig field = config_of(folder.write("a.txt", std::string(100, 'x')), "stream");
  field.field = "body";
  refuse(field, ModelInput{}, {"data.field is \"body\"", "remove it"});
}

class EncodedDocuments : public test::WithTokenizers {
 protected:
  // The vocabulary is the bytes and <|endoftext|>, which is 256.
  DataConfig encoded(const std::string& text, const std::string& packing) {
    DataConfig data = config_of(text, packing);
    data.tokenizer = folder_.write("tokenizer.json", test::byte_tokenizer().dump());
    data.cache = folder_.path("cache");
    return data;
  }
  static ModelInput input() {
    ModelInput model = keeps_apart();
    model.vocab = 257;
    return model;
  }
};

TEST_F(EncodedDocuments, EndWithTheEndOfText) {
  const std::string path = folder_.write("a.jsonl", lines({"abc", "de", "fg<|endoftext|>"}));
  for (int time = 0; time < 2; ++time) {
    const DataSplit split = open_data(encoded(path, "whole"), input(), 1);
    ASSERT_EQ(split.train->size(), 2);
    const Fields fields = split.train->read({0, 1}, 0);
    EXPECT_EQ(row_of(fields, "input_ids", 0), (Numbers{'a', 'b', 'c', 256, 'd', 'e', 256, 0}));
    EXPECT_EQ(row_of(fields, "labels", 0), (Numbers{'b', 'c', 256, kNone, 'e', 256, kNone, kNone}));
    EXPECT_EQ(row_of(fields, "input_ids", 1), (Numbers{'f', 'g', 256, 0, 0, 0, 0, 0}));
    // The test cuts the files of ends off before the second pass. They are made again.
    for (const auto& file : std::filesystem::directory_iterator(folder_.path("cache"))) {
      if (file.path().extension() == ".ends") std::filesystem::resize_file(file.path(), 8);
    }
  }
  const DataSplit stream = open_data(encoded(path, "stream"), input(), 1);
  EXPECT_EQ(row_of(stream.train->read({0}, 0), "labels", 0), (Numbers{'b', 'c', 256, 'd', 'e', 256, 'f', 'g'}));
}

TEST_F(EncodedDocuments, ReadFilesAsDocumentsToo) {
  folder_.write("1.txt", "abc");
  folder_.write("2.txt", "de");
  const DataSplit split = open_data(encoded(folder_.path("*.txt"), "whole"), input(), 1);
  EXPECT_EQ(row_of(split.train->read({0}, 0), kDocumentStarts, 0), (Numbers{0, 0, 0, 0, 4, 4, 4, 7}));
  expect_error([&] { open_data(encoded(folder_.write("b.txt", "a\xff"), "whole"), input(), 1); },
               {"b.txt", "not UTF-8"});
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
