// Text to token ids and back with a Hugging Face tokenizer.json, by the Python package `tokenizers`.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "twobp/data/text/token_dataset.h"

namespace twobp {

class PythonProcess;

// `path`, or the tokenizer.json in it if it is a folder. Throws Error: there is none.
std::string tokenizer_file(const std::string& path);

// The narrowest type of token file that holds all ids of a vocabulary.
TokenType token_type_for(int64_t vocab);

// A Python process is kept open until the object goes. Every member throws Error: Python or the package is
// missing (with the pip command), no valid tokenizer.json, text that is not UTF-8, Python crashed, or gave no
// answer for `timeout` seconds. After an Error the object is of no more use. For one thread at a time.
class Tokenizer {
 public:
  explicit Tokenizer(const std::string& path, double timeout = 300);
  ~Tokenizer();
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  const std::string& path() const { return path_; }  // of the tokenizer.json
  // The largest id, tokens added later included, plus 1: model.vocab must be at least this.
  int64_t vocab() const { return vocab_; }
  // The id that ends a text: eos_token of the tokenizer_config.json beside it, or a special token with a
  // usual name (<|endoftext|>, </s>).
  std::optional<int64_t> end_of_text() const { return end_of_text_; }

  // Names of special tokens in the text become those tokens. `special`: also adds what the tokenizer itself
  // puts around a text, such as its beginning-of-text token.
  std::vector<int64_t> encode(std::string_view text, bool special = false);
  // Bytes that are no UTF-8 become U+FFFD; ids that the tokenizer does not know, nothing. `special`: special
  // tokens are written by name, else left out.
  std::string decode(std::span<const int64_t> ids, bool special = false);

  // Encodes a whole text, whatever its length, in bounded memory, and hands the ids as numbers of
  // token_type_for(vocab()) to `sink`, part after part. The text is cut about every 256 KiB, after a newline
  // where there is one (else at a space), and the pieces are encoded apart; nothing is added to them, but a
  // tokenizer that begins every text with a space begins every piece so. `origin` names the text in messages.
  void encode_all(std::string_view text, const std::string& origin,
                  const std::function<void(std::string_view)>& sink);

 private:
  std::string path_;
  std::unique_ptr<PythonProcess> python_;
  int64_t vocab_ = 0;
  std::optional<int64_t> end_of_text_;
};

// Decodes token by token, for output as it comes: a character whose bytes are spread over several tokens is
// held back until it is whole.
class TokenStream {
 public:
  // `before`: what the text follows, a prompt, which is not given out.
  explicit TokenStream(Tokenizer& tokenizer, std::vector<int64_t> before = {})
      : tokenizer_(tokenizer), ids_(std::move(before)), written_(ids_.size()) {}
  // The text that this token completes: often a word, sometimes nothing.
  std::string add(int64_t id);
  // What is still held back, at the end.
  std::string finish();

 private:
  std::string advance(bool whole);

  Tokenizer& tokenizer_;
  std::vector<int64_t> ids_;
  size_t context_ = 0;  // ids before this no longer matter for the text of the next
  size_t written_ = 0;  // ids before this have been given out
};

}  // namespace twobp
