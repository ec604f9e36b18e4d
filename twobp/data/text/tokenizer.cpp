// tokenizer.py describes the requests and answers.
#include "twobp/data/text/tokenizer.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <thread>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/data/text/python.h"
#include "twobp/files/paths.h"

namespace twobp {

extern const char* const kTokenizerScript;  // contents of tokenizer.py, inserted by CMake

namespace {

using nlohmann::json;

constexpr size_t kPiece = 1 << 18;  // the package needs more than 100 bytes of memory for each byte of this
constexpr int64_t kMostTokens = int64_t{1} << 31;  // in one answer

// Reads an answer, which is a JSON object; throws the error that it reports.
json receive(PythonProcess& python, const std::string& path) {
  const json answer = json::parse(python.read_line(), nullptr, /*allow_exceptions=*/false);
  TWOBP_CHECK(answer.is_object(), path,
              ": the tokenizer's Python process returned no JSON object: $TWOBP_PYTHON "
              "must name a Python interpreter.");
  const auto error = answer.find("error");
  if (error != answer.end()) fail(path, ": ", error->is_string() ? error->get<std::string>() : error->dump());
  return answer;
}

// Reads an integer from an answer.
int64_t number(const json& answer, const char* key, int64_t largest, const std::string& path) {
  const auto found = answer.find(key);
  const bool integer = found != answer.end() && found->is_number_integer();
  const int64_t value = integer ? found->get<int64_t>() : -1;
  TWOBP_CHECK(value >= 0 && value <= largest, path, ": the tokenizer's Python process returned no valid \"", key,
              "\".");
  return value;
}

// True for any byte of a UTF-8 character but the first.
bool is_continuation(char byte) {
  return (static_cast<unsigned char>(byte) & 0xc0) == 0x80;
}

// Length of the next piece of `text`.
size_t cut(std::string_view text) {
  if (text.size() <= kPiece) return text.size();
  const size_t newline = text.rfind('\n', kPiece - 1);
  if (newline != std::string_view::npos) {
    // Empty lines belong to the preceding text, because tokenizers join newlines.
    const size_t next = std::min(text.find_first_not_of('\n', newline), text.size());
    return std::min(next, 2 * kPiece);
  }
  // A space belongs to the word that follows.
  const size_t space = text.rfind(' ', kPiece - 1);
  if (space != std::string_view::npos && space > 0) return space;
  size_t end = kPiece;
  while (end > kPiece - 4 && is_continuation(text[end])) --end;
  return end;
}

// The package encodes the pieces of a request in parallel.
size_t encoded_together() {
  return std::clamp<size_t>(std::thread::hardware_concurrency(), 1, 8);
}

}  // namespace

std::string tokenizer_file(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  const bool folder = fs::is_directory(path, ignored);
  const std::string file = folder ? (fs::path(path) / "tokenizer.json").string() : path;
  TWOBP_CHECK(fs::is_regular_file(file, ignored), file, hub_hint(path), ": there is no such file",
              folder ? ": name a folder with a tokenizer.json in it, or the file itself." : ".");
  return file;
}

void check_vocab(const std::string& tokenizer, int64_t vocab, int64_t of_model) {
  TWOBP_CHECK(vocab <= of_model, tokenizer, ": the tokenizer has a vocabulary of ", vocab, ", but model.vocab is ",
              of_model, ": for a new model, set model.vocab to ", vocab,
              " or more; for model.from, set data.tokenizer to the tokenizer of that model.");
}

TokenType token_type_for(int64_t vocab) {
  return vocab <= int64_t{1} << 16 ? TokenType::kUInt16 : TokenType::kUInt32;
}

Tokenizer::Tokenizer(const std::string& path, double timeout)
    : path_(tokenizer_file(path)),
      python_(std::make_unique<PythonProcess>(path_, kTokenizerScript, std::vector{path_}, timeout)) {
  const json hello = receive(*python_, path_);
  vocab_ = number(hello, "vocab", int64_t{1} << 32, path_);
  TWOBP_CHECK(vocab_ > 0, path_, ": the tokenizer has no tokens.");
  if (hello.contains("end_of_text") && !hello["end_of_text"].is_null()) {
    end_of_text_ = number(hello, "end_of_text", vocab_ - 1, path_);
  }
}

Tokenizer::~Tokenizer() = default;

std::string Tokenizer::encode_pieces(std::string_view bytes, const std::vector<size_t>& lengths,
                                     const std::function<void(int64_t)>& not_utf8) {
  python_->write(json{{"pieces", lengths}, {"width", token_bytes(token_type_for(vocab_))}}.dump() + "\n");
  python_->write(bytes);
  const json answer = receive(*python_, path_);
  if (answer.contains("not_utf8")) not_utf8(number(answer, "not_utf8", kMostTokens, path_));
  const int64_t tokens = number(answer, "tokens", kMostTokens, path_);
  return python_->read(static_cast<size_t>(tokens * token_bytes(token_type_for(vocab_))));
}

void Tokenizer::encode_all(const InputFile& text, const std::function<void(std::string_view)>& sink) {
  const size_t together = encoded_together();
  std::string window;  // every piece is cut in view of the longest piece
  for (size_t begin = 0; begin < text.size();) {
    window.resize(std::min(text.size() - begin, 2 * kPiece * together));
    text.read(begin, window.data(), window.size());
    const std::string_view rest = window;
    std::vector<size_t> lengths;
    size_t end = 0;
    while (end < rest.size() && lengths.size() < together) {
      lengths.push_back(cut(rest.substr(end)));
      end += lengths.back();
    }
    sink(encode_pieces(rest.substr(0, end), lengths, [&](int64_t at) {
      fail(text.path(), ": byte ", static_cast<int64_t>(begin) + at,
           " is not UTF-8: convert the text, for instance with iconv, or remove it.");
    }));
    begin += end;
  }
}

}  // namespace twobp
