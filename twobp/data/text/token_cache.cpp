// The texts of a run are one entry. It is valid if its description equals a new one word for word, and its
// token file has the described size.
#include "twobp/data/text/token_cache.h"

#include <filesystem>
#include <optional>
#include <system_error>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/core/random.h"
#include "twobp/data/text/plain_text.h"
#include "twobp/data/text/tokenizer.h"
#include "twobp/files/input_file.h"
#include "twobp/files/new_file.h"
#include "twobp/files/paths.h"

namespace twobp {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kFormat = 7;  // increase it when the same text would give other tokens
constexpr const char* kWhat = "tokenized text";
constexpr size_t kMostName = 60;
constexpr int kMaxDepth = 4;  // of a description
constexpr int64_t kMostVocab = int64_t{1} << 32;

struct Request {
  std::vector<std::string> texts;
  bool end_of_text = true;
  std::string tokenizer_hash;
};

std::string absolute(const std::string& path) {
  return fs::absolute(path).lexically_normal().string();
}

// The file that names the end-of-text token lies next to the tokenizer.
std::string hash_tokenizer(const std::string& file) {
  Hash hash;
  const auto add = [&](const std::string& path) {
    const std::vector<uint8_t> bytes = read_whole_file(path);
    hash.add(static_cast<int64_t>(bytes.size()));
    hash.add({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  };
  add(file);
  const fs::path beside = fs::path(file).parent_path() / "tokenizer_config.json";
  std::error_code none;
  if (fs::is_regular_file(beside, none)) add(beside);
  return hash.text();
}

// The sources of the tokens, in a form that can be compared.
json source_of(const Request& request) {
  Hash state;
  int64_t bytes = 0;
  for (const std::string& text : request.texts) {
    state.add(absolute(text)).add(std::string_view("\0", 1)).add(state_of_file(text));
    bytes += static_cast<int64_t>(fs::file_size(text));
  }
  const json source = {{"first", absolute(request.texts.front())},
                       {"texts", request.texts.size()},
                       {"bytes", bytes},
                       {"state", state.text()},
                       {"tokenizer", request.tokenizer_hash},
                       {"end_of_text", request.end_of_text},
                       {"format", kFormat}};
  // A name need not be UTF-8, but the JSON text must be.
  return json::parse(source.dump(-1, ' ', false, json::error_handler_t::replace));
}

struct Entry {
  int64_t tokens = 0;
  int64_t vocab = 0;  // of the tokenizer
};

struct EntryPaths {
  fs::path tokens;
  fs::path description;
};

// The part of the name before the hash is for human readers.
EntryPaths entry_paths(const fs::path& folder, const Request& request) {
  Hash hash;
  for (const std::string& text : request.texts) hash.add(absolute(text)).add(std::string_view("\0", 1));
  hash.add(request.tokenizer_hash).add(int64_t{request.end_of_text});
  const std::string name = fs::path(request.texts.front()).filename().string().substr(0, kMostName) + "-" + hash.text();
  return {folder / (name + ".bin"), folder / (name + ".json")};
}

bool has_size(const fs::path& file, int64_t count, int64_t width) {
  std::error_code error;
  const uintmax_t bytes = fs::file_size(file, error);
  return !error && count >= 0 && bytes % static_cast<uintmax_t>(width) == 0 &&
         bytes / static_cast<uintmax_t>(width) == static_cast<uintmax_t>(count);
}

std::optional<Entry> find_entry(const EntryPaths& paths, const json& source) {
  json found;
  try {
    found = read_json_object(paths.description.string(), kMaxDepth);
  } catch (const Error&) {  // missing or damaged; it is made again
    return std::nullopt;
  }
  if (found.value("source", json()) != source) return std::nullopt;
  const json tokens = found.value("tokens", json());
  const json vocab = found.value("vocab", json());
  if (!tokens.is_number_integer() || !vocab.is_number_integer()) return std::nullopt;
  const Entry entry = {tokens.get<int64_t>(), vocab.get<int64_t>()};
  if (entry.tokens < 0 || entry.vocab < 1 || entry.vocab > kMostVocab) return std::nullopt;
  const bool whole = has_size(paths.tokens, entry.tokens, token_bytes(token_type_for(entry.vocab)));
  return whole ? std::optional(entry) : std::nullopt;
}

// The end-of-text token as a token file has it; empty if the tokenizer has none.
std::string end_bytes(const Request& request, const Tokenizer& tokenizer) {
  if (!request.end_of_text || !tokenizer.end_of_text()) return "";
  const auto id = static_cast<uint32_t>(*tokenizer.end_of_text());
  const auto width = static_cast<size_t>(token_bytes(token_type_for(tokenizer.vocab())));
  return {reinterpret_cast<const char*>(&id), width};  // little-endian, like all supported machines
}

Entry make_entry(const EntryPaths& paths, const Request& request, const json& source, Tokenizer& tokenizer) {
  NewFile tokens(paths.tokens);
  const auto width = static_cast<size_t>(token_bytes(token_type_for(tokenizer.vocab())));
  Entry entry{0, tokenizer.vocab()};
  const auto write = [&](std::string_view ids) {
    tokens.write(ids.data(), ids.size());
    entry.tokens += static_cast<int64_t>(ids.size() / width);
  };
  const std::string end = end_bytes(request, tokenizer);
  for (const std::string& text : request.texts) {
    std::string last;
    const InputFile file(text);
    check_text(file);
    tokenizer.encode_all(file, [&](std::string_view part) {
      write(part);
      if (part.size() >= width) last = part.substr(part.size() - width);
    });
    if (!last.empty() && last != end) write(end);
  }
  TWOBP_CHECK(source_of(request) == source, request.texts.front(),
              request.texts.size() == 1 ? "" : concat(" or another of the ", request.texts.size(), " texts"),
              ": was changed while it was read: start again when it is complete.");
  NewFile description(paths.description);
  description.write(json{{"source", source}, {"tokens", entry.tokens}, {"vocab", entry.vocab}}.dump(2) + "\n");
  // The old description must not be found with the new tokens.
  std::error_code ignored;
  fs::remove(paths.description, ignored);
  tokens.commit();
  description.commit();
  return entry;
}

}  // namespace

TokenizedText tokenize_text(const std::vector<std::string>& texts, const std::string& tokenizer,
                            const std::string& cache, int64_t vocab, bool end_of_text) {
  if (texts.empty()) return {};
  const std::string file = tokenizer_file(tokenizer);
  const Request request{texts, end_of_text, hash_tokenizer(file)};
  const fs::path folder = cache_folder(cache, kWhat);
  const EntryPaths paths = entry_paths(folder, request);
  const json source = source_of(request);
  std::optional<Entry> entry = find_entry(paths, source);
  if (!entry) {
    const LockedFolder locked(folder, kWhat);
    entry = find_entry(paths, source);  // the previous holder of the lock may have made it
    if (!entry) {
      Tokenizer encoder(file);
      check_vocab(file, encoder.vocab(), vocab);
      entry = make_entry(paths, request, source, encoder);
    }
  }
  check_vocab(file, entry->vocab, vocab);
  TokenizedText out;
  out.type = token_type_for(entry->vocab);
  if (entry->tokens > 0) out.files.push_back(paths.tokens.string());
  return out;
}

}  // namespace twobp
