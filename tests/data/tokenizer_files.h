// The tests of tokenizers share these helpers: small tokenizer.json files, a way to replace Python for a while, and a
// check for the package `tokenizers`.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/train/helpers.h"
#include "twobp/data/text/python.h"
#include "twobp/data/text/tokenizer.h"

namespace twobp::test {

// Writes a shell script that takes the place of Python.
inline std::string write_program(const TempFolder& folder, const std::string& name, const std::string& body) {
  const std::string path = folder.write(name, "#!/bin/sh\n" + body + "\n");
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  return path;
}

// Returns the path from find_python, made absolute so that it works from any folder.
inline std::string absolute_python() {
  const std::string python = find_python();
  return python.find('/') == std::string::npos ? python : std::filesystem::absolute(python).string();
}

// Returns the character that stands for a byte in byte-level BPE (GPT-2): the byte itself if it is visible, else a
// character above 255.
inline std::string byte_character(int byte) {
  const auto seen = [](int b) { return (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174; };
  int code = byte;
  if (!seen(byte)) {
    code = 256;
    for (int b = 0; b < byte; ++b) code += seen(b) ? 0 : 1;
  }
  if (code < 0x80) return {static_cast<char>(code)};
  return {static_cast<char>(0xc0 | code >> 6), static_cast<char>(0x80 | (code & 0x3f))};
}

// Makes byte-level BPE. Token i is the byte i. Token 256 is "he" if `merge`. The special token <|endoftext|> comes
// last.
inline nlohmann::json byte_tokenizer(bool merge = false) {
  nlohmann::json vocab;
  for (int byte = 0; byte < 256; ++byte) vocab[byte_character(byte)] = byte;
  nlohmann::json merges = nlohmann::json::array();
  if (merge) {
    vocab["he"] = 256;
    merges.push_back("h e");
  }
  return {
      {"version", "1.0"},
      {"truncation", nullptr},
      {"padding", nullptr},
      {"added_tokens",
       {{{"id", merge ? 257 : 256},
         {"content", "<|endoftext|>"},
         {"single_word", false},
         {"lstrip", false},
         {"rstrip", false},
         {"normalized", false},
         {"special", true}}}},
      {"normalizer", nullptr},
      {"pre_tokenizer",
       {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}}},
      {"post_processor", nullptr},
      {"decoder", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}}},
      {"model",
       {{"type", "BPE"},
        {"dropout", nullptr},
        {"unk_token", nullptr},
        {"continuing_subword_prefix", nullptr},
        {"end_of_word_suffix", nullptr},
        {"fuse_unk", false},
        {"byte_fallback", false},
        {"vocab", vocab},
        {"merges", merges}}}};
}

// Makes a tokenizer of whole words between spaces, with the given ids. Other words are [UNK], id 0.
inline nlohmann::json word_tokenizer(std::map<std::string, int64_t> words) {
  words["[UNK]"] = 0;
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", nlohmann::json::array()},
          {"normalizer", nullptr},
          {"pre_tokenizer", {{"type", "WhitespaceSplit"}}},
          {"post_processor", nullptr},
          {"decoder", nullptr},
          {"model", {{"type", "WordLevel"}, {"vocab", words}, {"unk_token", "[UNK]"}}}};
}

// Returns why the tests of tokenizers cannot run here. It is empty if they can.
inline const std::string& tokenizers_missing() {
  static const std::string reason = [] {
    const TempFolder folder;
    try {
      Tokenizer(folder.write("tokenizer.json", word_tokenizer({}).dump()));
    } catch (const Error& error) {
      const std::string what = error.what();
      const bool missing =
          what.find("pip install") != std::string::npos || what.find("cannot start") != std::string::npos;
      return missing ? what : "";
    }
    return std::string();
  }();
  return reason;
}

// This is the base of tests that need the package.
class WithTokenizers : public testing::Test {
 protected:
  void SetUp() override {
    if (!tokenizers_missing().empty()) GTEST_SKIP() << tokenizers_missing();
  }

  TempFolder folder_;
};

}  // namespace twobp::test
