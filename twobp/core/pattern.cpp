#include "twobp/core/pattern.h"

#include <regex.h>

#include "twobp/core/check.h"

namespace twobp {

struct Pattern::Compiled {
  explicit Compiled(const std::string& expression) {
    const int code = regcomp(&regex, ("^(" + expression + ")$").c_str(), REG_EXTENDED);
    TWOBP_CHECK(code == 0, "'", expression, "' is not a regular expression");
  }
  ~Compiled() { regfree(&regex); }
  Compiled(const Compiled&) = delete;
  Compiled& operator=(const Compiled&) = delete;

  regex_t regex;
};

Pattern::Pattern(const std::string& expression) : compiled_(std::make_shared<Compiled>(expression)) {}

std::vector<std::string> Pattern::match(const std::string& text) const {
  if (text.find('\0') != std::string::npos) return {};
  std::vector<regmatch_t> places(compiled_->regex.re_nsub + 1);
  if (regexec(&compiled_->regex, text.c_str(), places.size(), places.data(), 0) != 0) return {};
  std::vector<std::string> groups;
  for (size_t i = 1; i < places.size(); ++i) {  // the first group is the whole
    const auto& [begin, end] = places[i];
    groups.push_back(begin < 0 ? "" : text.substr(begin, end - begin));
  }
  return groups;
}

}  // namespace twobp
