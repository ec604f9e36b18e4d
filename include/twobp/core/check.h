// The library reports every error in one way: TWOBP_CHECK throws twobp::Error with a message built from its arguments.
// Nothing in the library prints or exits.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace twobp {

// An error that a user can act on. The message says what is wrong, where, and what to do.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Concatenates the arguments, as operator<< writes them.
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
