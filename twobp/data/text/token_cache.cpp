// An entry is valid if its description equals a new one word for word, and its token file has the described
// size.
#include "twobp/data/text/token_cache.h"

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <memory>
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
#include "twobp/files/json_file.h"
#include "twobp/files/mapped_file.h"
#include "twobp/files/new_file.h"

namespace twobp {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kFormat = 1;  // increase it when the same text would give other tokens
constexpr size_t kMostName = 60;
constexpr int kMaxDepth = 4;  // of a description
constexpr int64_t kMostVocab = int64_t{1} << 32;
constexpr double kLockedFor = 86400;  // in seconds, because tokenizing may take long

// FNV-1a (Fowler, Noll, Vo), in hexadecimal. It detects accidental changes, not malicious ones.
std::string hash_text(std::string_view bytes) {
  uint64_t hash = 14695981039346656037ull;
  for (const char byte : bytes) hash = (hash ^ static_cast<unsigned char>(byte)) * 1099511628211ull;
  char out[17];
  std::snprintf(out, sizeof(out), "%016llx", static_cast<unsigned long long>(hash));
  return out;
}

std::string_view text_of(const MappedFile& file) {
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

// The sources of the tokens, in a form that can be compared.
json source_of(const std::string& text, const std::string& tokenizer_hash) {
  struct stat status {};
  TWOBP_CHECK(::stat(text.c_str(), &status) == 0, text,
              ": cannot open: ", std::generic_category().message(errno), ".");
  const json source = {
      {"text", fs::absolute(text).lexically_normal().string()},
      {"bytes", static_cast<int64_t>(status.st_size)},
      {"changed_ns", int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec},
      {"tokenizer", tokenizer_hash},
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
EntryPaths entry_paths(const fs::path& folder, const std::string& text, const std::string& tokenizer_hash) {
  const std::string path = fs::absolute(text).lexically_normal().string();
  const std::string name =
      fs::path(text).filename().string().substr(0, kMostName) + "-" + hash_text(path + '\0' + tokenizer_hash);
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

void check_vocab(const std::string& tokenizer, int64_t tokens, int64_t vocab) {
  TWOBP_CHECK(tokens <= vocab, tokenizer, ": the tokenizer has ids up to ", tokens - 1, ", a vocabulary of ",
              tokens, ", but model.vocab is ", vocab, ": set model.vocab to ", tokens,
              " or more, or data.tokenizer to the tokenizer of this model.");
}

Entry make_entry(const EntryPaths& paths, const std::string& text, const json& source,
                 const std::string& tokenizer_hash, Tokenizer& tokenizer) {
  const MappedFile file(text);
  NewFile tokens(paths.tokens);
  int64_t bytes = 0;
  tokenizer.encode_all(text_of(file), text, [&](std::string_view part) {
    tokens.write(part.data(), part.size());
    bytes += static_cast<int64_t>(part.size());
  });
  TWOBP_CHECK(source_of(text, tokenizer_hash) == source, text,
              ": was changed while it was read: start again when it is complete.");
  const Entry entry = {bytes / token_bytes(token_type_for(tokenizer.vocab())), tokenizer.vocab()};
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

std::vector<fs::path> cache_folders(const std::string& configured, const std::string& first_text) {
  if (!configured.empty()) return {configured};
  std::vector<fs::path> folders = {fs::path(first_text).parent_path() / ".twobp-cache"};
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  if (cache != nullptr && *cache != '\0') {
    folders.push_back(fs::path(cache) / "twobp");
  } else if (home != nullptr && *home != '\0') {
    folders.push_back(fs::path(home) / ".cache" / "twobp");
  }
  return folders;
}

// The first folder that can be written. While this object lives, it is locked against other writers.
class LockedFolder {
 public:
  explicit LockedFolder(const std::vector<fs::path>& folders) {
    std::string why;
    for (const fs::path& folder : folders) {
      std::error_code error;
      fs::create_directories(folder, error);
      fd_ = ::open((folder / "lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
      if (fd_ >= 0) {
        path_ = folder;
        break;
      }
      why += concat(why.empty() ? "" : "; ", folder.string(), ": ",
                    error ? error.message() : std::generic_category().message(errno));
    }
    TWOBP_CHECK(fd_ >= 0, "cannot keep tokenized text: ", why,
                ": set data.cache to a folder that can be written.");
    // Some file systems have no locks. Then two runs may do the same work, which is harmless.
    const double begin = awake_seconds();
    while (::flock(fd_, LOCK_EX | LOCK_NB) != 0 && (errno == EWOULDBLOCK || errno == EINTR)) {
      TWOBP_CHECK(awake_seconds() - begin < kLockedFor, path_.string(),
                  ": another run has been tokenizing there for a day: it is stuck, or stopped.");
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }
  ~LockedFolder() { ::close(fd_); }
  LockedFolder(const LockedFolder&) = delete;
  LockedFolder& operator=(const LockedFolder&) = delete;

  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
  int fd_ = -1;
};

}  // namespace

TokenizedText tokenize_text(const std::vector<std::string>& texts, const std::string& tokenizer,
                            const std::string& cache, int64_t vocab) {
  TokenizedText out;
  if (texts.empty()) return out;
  const std::string file = tokenizer_file(tokenizer);
  const std::string hash = hash_text(text_of(MappedFile(file)));
  const std::vector<fs::path> folders = cache_folders(cache, texts.front());
  std::optional<LockedFolder> locked;  // set once something must be made
  std::unique_ptr<Tokenizer> encoder;
  for (const auto& text : texts) {
    const json source = source_of(text, hash);
    std::optional<Entry> entry;
    EntryPaths paths;
    const auto find = [&](const fs::path& folder) {
      paths = entry_paths(folder, text, hash);
      entry = find_entry(paths, source);
    };
    for (size_t i = 0; i < folders.size() && !entry; ++i) find(folders[i]);
    if (!entry) {
      if (!locked) locked.emplace(folders);
      find(locked->path());  // the previous holder of the lock may have made it
    }
    if (!entry) {
      if (!encoder) encoder = std::make_unique<Tokenizer>(file);
      check_vocab(file, encoder->vocab(), vocab);
      entry = make_entry(paths, text, source, hash, *encoder);
    }
    check_vocab(file, entry->vocab, vocab);
    const TokenType type = token_type_for(entry->vocab);
    TWOBP_CHECK(out.files.empty() || type == out.type, paths.description.string(),
                ": names another tokenizer than the files next to it: remove it.");
    out.type = type;
    if (entry->tokens > 0) out.files.push_back(paths.tokens.string());
  }
  return out;
}

}  // namespace twobp
