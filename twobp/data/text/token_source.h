// The tokens of texts, one after the other. Any thread may read it.
#pragma once

#include <cstdint>
#include <string>

namespace twobp {

class TokenSource {
 public:
  virtual ~TokenSource() = default;
  virtual std::string name() const = 0;  // of the data, for messages: "data.tokens"
  virtual int64_t tokens() const = 0;
  // The tokens [begin, begin + count), which must exist.
  virtual void copy(int64_t begin, int64_t count, int64_t* to) const = 0;
  // "3 files, 1200 tokens in all": for messages.
  virtual std::string description() const = 0;
};

}  // namespace twobp
