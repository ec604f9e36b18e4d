// The texts of a run are one entry. It is valid if its description equals a new one word for word, and its
// token file has the described size.
#include "twobp/data/text/token_cache.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <system_error>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/core/random.h"
#include "twobp/data/text/documents.h"
#include "twobp/data/text/tokenizer.h"
#include "twobp/files/input_file.h"
#include "twobp/files/new_file.h"
#include "twobp/files/paths.h"

namespace twobp {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kFormat = 6;  // increase it when the same text would give other tokens
constexpr const char* kWhat = "tokenized text";
constexpr size_t kMostName = 60;
constexpr int kMaxDepth = 4;  // of a description
constexpr int64_t kMostVocab = int64_t{1} << 32;

struct Request {
  std::vector<std::string> texts;
  bool end_of_text = true;
  std::string tokenizer_hash;
  std::string field{};  // of documents; empty: the texts are one row
};

std::string absolute(const std::string& path) {
  return fs::absolute(path).lexically_normal().string();
}

// The files that name the end-of-text token and have the chat template lie next to the tokenizer.
std::string hash_tokenizer(const std::string& file) {
  Hash hash;
  const auto add = [&](const std::string& path) {
    const std::vector<uint8_t> bytes = read_whole_file(path);
    hash.add(static_cast<int64_t>(bytes.size()));
    hash.add({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  };
  add(file);
  const fs::path folder = fs::path(file).parent_path();
  std::vector<std::string> beside = additional_chat_templates(folder);
  beside.insert(beside.begin(), {"tokenizer_config.json", "chat_template.jinja"});
  for (const std::string& name : beside) {
    std::error_code none;
    if (fs::is_regular_file(folder / name, none)) add(folder / name);
  }
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
                       {"field", request.field},
                       {"format", kFormat}};
  // A name need not be UTF-8, but the JSON text must be.
  return json::parse(source.dump(-1, ' ', false, json::error_handler_t::replace));
}

struct Entry {
  int64_t tokens = 0;
  int64_t vocab = 0;  // of the tokenizer
  int64_t documents = 0;
  bool targets = false;  // there is a file of them
};

struct EntryPaths {
  fs::path tokens;
  fs::path description;
  fs::path ends;
  fs::path targets;
};

// The part of the name before the hash is for human readers.
EntryPaths entry_paths(const fs::path& folder, const Request& request) {
  Hash hash;
  for (const std::string& text : request.texts) hash.add(absolute(text)).add(std::string_view("\0", 1));
  hash.add(request.tokenizer_hash).add(int64_t{request.end_of_text}).add(request.field);
  const std::string name = fs::path(request.texts.front()).filename().string().substr(0, kMostName) + "-" + hash.text();
  return {folder / (name + ".bin"), folder / (name + ".json"), folder / (name + ".ends"), folder / (name + ".targets")};
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
  const json documents = found.value("documents", json(0));
  const json targets = found.value("targets", json(false));
  if (!documents.is_number_unsigned() || !targets.is_boolean()) return std::nullopt;
  const Entry entry = {tokens.get<int64_t>(), vocab.get<int64_t>(), documents.get<int64_t>(), targets.get<bool>()};
  if (entry.tokens < 0 || entry.vocab < 1 || entry.vocab > kMostVocab) return std::nullopt;
  const bool whole = has_size(paths.tokens, entry.tokens, token_bytes(token_type_for(entry.vocab))) &&
                     (entry.documents == 0 || has_size(paths.ends, entry.documents, sizeof(int64_t))) &&
                     (!entry.targets || has_size(paths.targets, entry.tokens, 1));
  return whole ? std::optional(entry) : std::nullopt;
}

// The end-of-text token as a token file has it; empty if the tokenizer has none.
std::string end_bytes(const Request& request, const Tokenizer& tokenizer) {
  if (!request.end_of_text || !tokenizer.end_of_text()) return "";
  const auto id = static_cast<uint32_t>(*tokenizer.end_of_text());
  const auto width = static_cast<size_t>(token_bytes(token_type_for(tokenizer.vocab())));
  return {reinterpret_cast<const char*>(&id), width};  // little-endian, like all supported machines
}

// The files of an entry, as they are written.
class EntryFiles {
 public:
  EntryFiles(const EntryPaths& paths, const Tokenizer& tokenizer)
      : paths_(paths),
        tokens_(paths.tokens),
        width_(static_cast<size_t>(token_bytes(token_type_for(tokenizer.vocab())))) {
    entry_.vocab = tokenizer.vocab();
  }

  size_t width() const { return width_; }
  const Entry& entry() const { return entry_; }
  void write(std::string_view ids) {
    tokens_.write(ids.data(), ids.size());
    entry_.tokens += static_cast<int64_t>(ids.size() / width_);
  }
  void end_document() {
    if (!ends_) ends_.emplace(paths_.ends);
    ends_->write(&entry_.tokens, sizeof(entry_.tokens));
    ++entry_.documents;
  }
  void write_targets(const std::string& bytes) {
    if (!targets_) targets_.emplace(paths_.targets);
    targets_->write(bytes);
    entry_.targets = true;
  }
  void commit(const json& source) {
    NewFile description(paths_.description);
    description.write(json{{"source", source},
                           {"tokens", entry_.tokens},
                           {"vocab", entry_.vocab},
                           {"documents", entry_.documents},
                           {"targets", entry_.targets}}
                          .dump(2) +
                      "\n");
    // The old description must not be found with the new tokens.
    std::error_code ignored;
    fs::remove(paths_.description, ignored);
    tokens_.commit();
    if (ends_) ends_->commit();
    if (targets_) targets_->commit();
    description.commit();
  }

 private:
  const EntryPaths& paths_;
  NewFile tokens_;
  std::optional<NewFile> ends_, targets_;
  size_t width_;
  Entry entry_;
};

void write_texts(const Request& request, Tokenizer& tokenizer, EntryFiles& files) {
  const std::string end = end_bytes(request, tokenizer);
  for (const std::string& text : request.texts) {
    std::string last;
    const InputFile file(text);
    check_text(file);
    tokenizer.encode_all(file, [&](std::string_view part) {
      files.write(part);
      if (part.size() >= files.width()) last = part.substr(part.size() - files.width());
    });
    if (!last.empty() && last != end) files.write(end);
  }
}

// Encodes the documents, many at a time.
class DocumentWriter {
 public:
  DocumentWriter(const Request& request, Tokenizer& tokenizer, EntryFiles& files)
      : tokenizer_(tokenizer), files_(files), end_(end_bytes(request, tokenizer)) {}

  void add(const Document& document) {
    if (files_.entry().documents == 0 && waiting_.empty()) chats_ = document.chat;
    TWOBP_CHECK(document.chat == chats_, document.origin, ": is a ", document.chat ? "chat" : "text",
                ", but earlier documents are ", chats_ ? "chats" : "texts", ": give one kind.");
    if (chats_) return write_chat(document);
    bytes_ += document.text.size();
    waiting_.push_back(document);
    if (bytes_ > kMostWaiting || waiting_.size() >= kMostDocuments) finish();
  }

  void finish() {
    const Tokenizer::Encoded encoded = tokenizer_.encode_documents(waiting_);
    std::string_view rest = encoded.ids;
    for (const int64_t count : encoded.counts) {
      const std::string_view ids = rest.substr(0, static_cast<size_t>(count) * files_.width());
      rest.remove_prefix(ids.size());
      if (ids.empty()) continue;
      files_.write(ids);
      if (!ids.ends_with(end_)) files_.write(end_);
      files_.end_document();
    }
    waiting_.clear();
    bytes_ = 0;
  }

 private:
  static constexpr size_t kMostWaiting = 4 << 20;
  static constexpr size_t kMostDocuments = 4096;

  void write_chat(const Document& document) {
    if (!encoder_) encoder_.emplace(tokenizer_.path());
    const EncodedChat chat = encoder_->encode(document);
    std::string ids;
    for (const int64_t id : chat.ids) {
      TWOBP_CHECK(id >= 0 && id < tokenizer_.vocab(), document.origin, ": token ", id, " is outside the vocabulary of ",
                  tokenizer_.vocab(), " of ", tokenizer_.path(), ".");
      const auto number = static_cast<uint32_t>(id);
      ids.append(reinterpret_cast<const char*>(&number), files_.width());
    }
    std::string targets(chat.ids.size(), 0);
    for (const auto& [begin, end] : chat.counted) std::fill(targets.begin() + begin, targets.begin() + end, 1);
    files_.write(ids);
    files_.write_targets(targets);
    files_.end_document();
  }

  Tokenizer& tokenizer_;
  EntryFiles& files_;
  std::string end_;
  bool chats_ = false;
  std::vector<Document> waiting_;
  size_t bytes_ = 0;
  std::optional<ChatEncoder> encoder_;
};

void write_documents(const Request& request, Tokenizer& tokenizer, EntryFiles& files) {
  DocumentWriter writer(request, tokenizer, files);
  for_each_document(request.texts, request.field, [&](const Document& document) { writer.add(document); });
  writer.finish();
}

Entry make_entry(const EntryPaths& paths, const Request& request, const json& source, Tokenizer& tokenizer) {
  EntryFiles files(paths, tokenizer);
  request.field.empty() ? write_texts(request, tokenizer, files) : write_documents(request, tokenizer, files);
  TWOBP_CHECK(source_of(request) == source, request.texts.front(),
              request.texts.size() == 1 ? "" : concat(" or another of the ", request.texts.size(), " texts"),
              ": was changed while it was read: start again when it is complete.");
  files.commit(source);
  return files.entry();
}

TokenizedText tokenize(const Request& request, const std::string& file, const std::string& cache, int64_t vocab) {
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
  if (entry->targets) out.targets = paths.targets.string();
  if (entry->documents > 0) {
    out.ends.resize(static_cast<size_t>(entry->documents));
    InputFile(paths.ends.string()).read(0, out.ends.data(), out.ends.size() * sizeof(int64_t));
    TWOBP_CHECK(
        std::is_sorted(out.ends.begin(), out.ends.end()) && out.ends.front() > 0 && out.ends.back() == entry->tokens,
        paths.ends.string(), ": is damaged: delete it.");
  }
  return out;
}

}  // namespace

TokenizedText tokenize_text(const std::vector<std::string>& texts, const std::string& tokenizer,
                            const std::string& cache, int64_t vocab, bool end_of_text) {
  if (texts.empty()) return {};
  const std::string file = tokenizer_file(tokenizer);
  return tokenize({texts, end_of_text, hash_tokenizer(file)}, file, cache, vocab);
}

TokenizedText tokenize_documents(const std::vector<std::string>& files, const std::string& field,
                                 const std::string& tokenizer, const std::string& cache, int64_t vocab,
                                 bool end_of_text) {
  const std::string file = tokenizer_file(tokenizer);
  return tokenize({files, end_of_text, hash_tokenizer(file), field}, file, cache, vocab);
}

}  // namespace twobp
