// Regular expressions of POSIX (regex.h, extended). <regex> takes seconds of compile time in every file.
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace twobp {

class Pattern {
 public:
  // Throws Error if `expression` is not valid.
  explicit Pattern(const std::string& expression);

  // The whole of `text` and its groups, from 1 (an optional group without a match is empty), if all of `text` matches;
  // otherwise nothing. Text that contains a zero byte does not match.
  std::vector<std::string> match(const std::string& text) const;

 private:
  struct Compiled;
  std::shared_ptr<const Compiled> compiled_;
};

}  // namespace twobp
