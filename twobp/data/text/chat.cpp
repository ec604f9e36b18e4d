// chat.py describes the requests and answers.
#include "twobp/data/text/chat.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include <nlohmann/json.hpp>

#include "twobp/core/check.h"
#include "twobp/data/text/python.h"

namespace twobp {

extern const char* const kChatScript;  // contents of chat.py, inserted by CMake

namespace {

using nlohmann::json;

constexpr double kChatTimeout = 300;  // importing transformers takes a while

json receive_chat(PythonProcess& python, const std::string& origin) {
  const json answer = json::parse(python.read_line(), nullptr, /*allow_exceptions=*/false);
  TWOBP_CHECK(answer.is_object(), origin, ": the Python process that renders chats returned no JSON object.");
  if (answer.contains("error")) fail(origin, ": ", answer["error"].get<std::string>(), ".");
  return answer;
}

}  // namespace

std::vector<std::string> additional_chat_templates(const std::string& folder) {
  const std::string within = "additional_chat_templates/";
  std::vector<std::string> names;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(std::filesystem::path(folder) / within, none)) {
    if (entry.path().extension() == ".jinja") names.push_back(within + entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

ChatEncoder::ChatEncoder(const std::string& tokenizer) {
  const std::string folder = std::filesystem::absolute(tokenizer).parent_path().string();
  python_ = std::make_unique<PythonProcess>(folder, kChatScript, std::vector{folder}, kChatTimeout);
  receive_chat(*python_, folder);
}

ChatEncoder::~ChatEncoder() = default;

EncodedChat ChatEncoder::encode(const Document& chat) {
  const std::string tools = chat.tools.empty() ? "[]" : chat.tools;
  python_->write(concat(R"({"messages": )", chat.text, R"(, "tools": )", tools, "}\n"));
  const json answer = receive_chat(*python_, chat.origin);
  EncodedChat out;
  try {
    out.ids = answer.at("ids").get<std::vector<int64_t>>();
    out.counted = answer.at("counted").get<std::vector<std::pair<int64_t, int64_t>>>();
  } catch (const json::exception&) {
    fail(chat.origin, ": the Python process that renders chats returned no valid answer.");
  }
  for (const auto& [begin, end] : out.counted) {
    TWOBP_CHECK(begin >= 0 && begin < end && end <= static_cast<int64_t>(out.ids.size()), chat.origin,
                ": the Python process that renders chats returned no valid answer.");
  }
  return out;
}

}  // namespace twobp
