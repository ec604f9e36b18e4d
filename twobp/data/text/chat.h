// Encodes chats with the chat template of a model's tokenizer, by Python's package transformers.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "twobp/data/text/documents.h"

namespace twobp {

class PythonProcess;

// A tokenizer's chat templates besides its main one, in its folder: "additional_chat_templates/NAME.jinja", by name.
// transformers takes the one named tool_use for chats with tools.
std::vector<std::string> additional_chat_templates(const std::string& folder);

struct EncodedChat {
  std::vector<int64_t> ids;
  std::vector<std::pair<int64_t, int64_t>> counted;  // [begin, end) of the tokens of the assistant's turns
};

// The assistant's turns are those between the template's {% generation %} marks, or else from the prompt to answer
// (add_generation_prompt) to the end of their content and what the template adds to end a turn.
class ChatEncoder {
 public:
  // `tokenizer`: its tokenizer.json, whose folder also has the template. Throws Error if Python or the package is
  // missing, or there is no template.
  explicit ChatEncoder(const std::string& tokenizer);
  ~ChatEncoder();
  ChatEncoder(const ChatEncoder&) = delete;
  ChatEncoder& operator=(const ChatEncoder&) = delete;

  // Throws Error that names the chat's origin for one that the template cannot render, and for one without a turn of
  // the assistant. It can then go on with another.
  EncodedChat encode(const Document& chat);

 private:
  std::unique_ptr<PythonProcess> python_;
};

}  // namespace twobp
