// The texts of a run are one entry. It is valid if its description equals a new one word for word, and its
// token file has the described size.
#include "twobp/data/text/token_cache.h"

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <optional>
#include <sys/file.h>
#include <sys/stat.h>
#include <system_error>
#include <thread>
#include <unistd.h>
#include <utility>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/core/patience.h"
#include "twobp/data/text/tokenizer.h"
#include "twobp/files/input_file.h"
#include "twobp/files/json_file.h"
#include "twobp/files/new_file.h"

namespace twobp {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kFormat = 2;  // increase it when the same text would give other tokens
constexpr size_t kMostName = 60;
constexpr int kMaxDepth = 4;  // of a description
constexpr int64_t kMostVocab = int64_t{1} << 32;
constexpr double kLockedFor = 86400;  // in seconds, because tokenizing may take long

// FNV-1a (Fowler, Noll, Vo). It detects accidental changes, not malicious ones.
class Hash {
 public:
  Hash& add(std::string_view bytes) {
    for (const char byte : bytes) hash_ = (hash_ ^ static_cast<unsigned char>(byte)) * 1099511628211ull;
    return *this;
  }
  Hash& add(int64_t number) { return add(std::to_string(number) + ","); }
  std::string text() const {
    char out[17];
    std::snprintf(out, sizeof(out), "%016llx", static_cast<unsigned long long>(hash_));
    return out;
  }

 private:
  uint64_t hash_ = 14695981039346656037ull;
};

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
  const fs::path config = fs::path(file).parent_path() / "tokenizer_config.json";
  std::error_code ignored;
  if (fs::is_regular_file(config, ignored)) add(config.string());
  return hash.text();
}

// The sources of the tokens, in a form that can be compared. A program can set a file's time of modification
// (cp -p, rsync, touch), but not the time at which its content or that time was changed (ctime).
json source_of(const Request& request) {
  Hash state;
  int64_t bytes = 0;
  const auto nanoseconds = [](const timespec& time) {
    return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
  };
  for (const std::string& text : request.texts) {
    struct stat status {};
    TWOBP_CHECK(::stat(text.c_str(), &status) == 0, text,
                ": cannot open: ", std::generic_category().message(errno), ".");
    state.add(absolute(text)).add(std::string_view("\0", 1)).add(static_cast<int64_t>(status.st_size));
    state.add(nanoseconds(status.st_mtim)).add(nanoseconds(status.st_ctim));
    state.add(static_cast<int64_t>(status.st_ino));
    bytes += static_cast<int64_t>(status.st_size);
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
  const std::string name =
      fs::path(request.texts.front()).filename().string().substr(0, kMostName) + "-" + hash.text();
  return {folder / (name + ".bin"), folder / (name + ".json")};
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
  std::error_code error;
  const uintmax_t bytes = fs::file_size(paths.tokens, error);
  const auto width = static_cast<uintmax_t>(token_bytes(token_type_for(entry.vocab)));
  if (error || bytes % width != 0 || bytes / width != static_cast<uintmax_t>(entry.tokens))
    return std::nullopt;
  return entry;
}

Entry make_entry(const EntryPaths& paths, const Request& request, const json& source, Tokenizer& tokenizer) {
  NewFile tokens(paths.tokens);
  const TokenType type = token_type_for(tokenizer.vocab());
  const auto width = static_cast<size_t>(token_bytes(type));
  std::string end;  // the end-of-text token
  if (request.end_of_text && tokenizer.end_of_text()) {
    const auto id = static_cast<uint32_t>(*tokenizer.end_of_text());
    end.assign(reinterpret_cast<const char*>(&id), width);  // little-endian, like all supported machines
  }
  int64_t bytes = 0;
  const auto write = [&](std::string_view part) {
    tokens.write(part.data(), part.size());
    bytes += static_cast<int64_t>(part.size());
  };
  for (const std::string& text : request.texts) {
    std::string last;
    tokenizer.encode_all(InputFile(text), [&](std::string_view part) {
      write(part);
      if (part.size() >= width) last = part.substr(part.size() - width);
    });
    if (!last.empty() && last != end) write(end);
  }
  TWOBP_CHECK(source_of(request) == source, request.texts.front(),
              request.texts.size() == 1 ? "" : concat(" or another of the ", request.texts.size(), " texts"),
              ": was changed while it was read: start again when it is complete.");
  const Entry entry = {bytes / static_cast<int64_t>(width), tokenizer.vocab()};
  NewFile description(paths.description);
  const std::string words =
      json{{"source", source}, {"tokens", entry.tokens}, {"vocab", entry.vocab}}.dump(2) + "\n";
  description.write(words.data(), words.size());
  // The old description must not be found with the new tokens.
  std::error_code ignored;
  fs::remove(paths.description, ignored);
  tokens.commit();
  description.commit();
  return entry;
}

fs::path cache_folder(const std::string& configured) {
  if (!configured.empty()) return configured;
  const char* cache = std::getenv("XDG_CACHE_HOME");
  if (cache != nullptr && *cache != '\0') return fs::path(cache) / "twobp";
  const char* home = std::getenv("HOME");
  TWOBP_CHECK(home != nullptr && *home != '\0',
              "cannot keep tokenized text: neither $XDG_CACHE_HOME nor $HOME is set: set data.cache to a "
              "folder.");
  return fs::path(home) / ".cache" / "twobp";
}

// While this object lives, the folder is locked against other writers.
class LockedFolder {
 public:
  explicit LockedFolder(const fs::path& folder) {
    std::error_code error;
    fs::create_directories(folder, error);
    fd_ = ::open((folder / "lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    TWOBP_CHECK(fd_ >= 0, "cannot keep tokenized text: ", folder.string(), ": ",
                error ? error.message() : std::generic_category().message(errno),
                ": set data.cache to a folder that can be written.");
    // Some file systems have no locks. Then two runs may do the same work, which is harmless.
    const double begin = awake_seconds();
    while (::flock(fd_, LOCK_EX | LOCK_NB) != 0 && (errno == EWOULDBLOCK || errno == EINTR)) {
      TWOBP_CHECK(awake_seconds() - begin < kLockedFor, folder.string(),
                  ": another run has been tokenizing there for a day: it is stuck, or stopped.");
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }
  ~LockedFolder() { ::close(fd_); }
  LockedFolder(const LockedFolder&) = delete;
  LockedFolder& operator=(const LockedFolder&) = delete;

 private:
  int fd_ = -1;
};

}  // namespace

TokenizedText tokenize_text(const std::vector<std::string>& texts, const std::string& tokenizer,
                            const std::string& cache, int64_t vocab, bool end_of_text) {
  if (texts.empty()) return {};
  const std::string file = tokenizer_file(tokenizer);
  const Request request = {texts, end_of_text, hash_tokenizer(file)};
  const fs::path folder = cache_folder(cache);
  const EntryPaths paths = entry_paths(folder, request);
  const json source = source_of(request);
  std::optional<Entry> entry = find_entry(paths, source);
  if (!entry) {
    const LockedFolder locked(folder);
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
