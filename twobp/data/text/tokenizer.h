// Converts text to token ids with a Hugging Face tokenizer.json, by the Python package `tokenizers`.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "twobp/data/text/token_source.h"
#include "twobp/files/input_file.h"

namespace twobp {

class PythonProcess;

// `path`, or the tokenizer.json in it if it is a folder. Throws Error if there is none.
std::string tokenizer_file(const std::string& path);

// Throws Error if the tokenizer's vocabulary is larger than the model's.
void check_vocab(const std::string& tokenizer, int64_t vocab, int64_t of_model);

// The narrowest token type that holds all ids of a vocabulary.
TokenType token_type_for(int64_t vocab);

// Keeps a Python process open for its lifetime. Every member throws Error if Python or the package is missing
// (with the pip command), the tokenizer.json is invalid, the text is not UTF-8, Python crashed, or it did not
// answer for `timeout` seconds. The object cannot be used after an Error. Only one thread at a time may use
// it.
class Tokenizer {
 public:
  explicit Tokenizer(const std::string& path, double timeout = 300);
  ~Tokenizer();
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  const std::string& path() const { return path_; }  // of the tokenizer.json
  // The largest id plus 1, including tokens added later. model.vocab must be at least this.
  int64_t vocab() const { return vocab_; }
  // The id that ends a text: eos_token of the tokenizer_config.json next to it, or a special token with a
  // usual name (<|endoftext|>, </s>).
  std::optional<int64_t> end_of_text() const { return end_of_text_; }

  // Encodes a whole text of any length in bounded memory, and passes the ids to `sink` part by part, as
  // numbers of token_type_for(vocab()). The text is cut about every 256 KiB, after a newline if there is one
  // (else at a space), and the pieces are encoded separately. Nothing is added to the pieces, but a tokenizer
  // that begins every text with a space begins every piece with one.
  void encode_all(const InputFile& text, const std::function<void(std::string_view)>& sink);

 private:
  // The ids of `bytes`, cut into pieces of these lengths. `not_utf8` is called with the offset of a wrong byte.
  std::string encode_pieces(std::string_view bytes, const std::vector<size_t>& lengths,
                            const std::function<void(int64_t)>& not_utf8);

  std::string path_;
  std::unique_ptr<PythonProcess> python_;
  int64_t vocab_ = 0;
  std::optional<int64_t> end_of_text_;
};

}  // namespace twobp
