// The one way the library reports an error: TWOBP_CHECK throws twobp::Error with a message that is built
// from the values at hand. Nothing in the library prints or exits.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace twobp {

// What a user can act on: says what is wrong, where, and what to do.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The arguments written one after the other, as operator<< writes them.
template <typename... Args>
std::string concat(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

template <typename... Args>
[[noreturn]] void fail(const Args&... args) {
  throw Error(concat(args...));
}

}  // namespace twobp

// Throws twobp::Error with the remaining arguments as its message unless `condition` holds.
#define TWOBP_CHECK(condition, ...)               \
  do {                                            \
    if (!(condition)) ::twobp::fail(__VA_ARGS__); \
  } while (false)
