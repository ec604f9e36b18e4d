// For tests of errors: what an action must throw, and what its message must say.
#pragma once

#include <exception>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "twobp/core/check.h"

namespace twobp::test {

// `text` has each of `parts` in it.
inline void expect_contains(const std::string& text, const std::vector<std::string>& parts) {
  for (const auto& part : parts) EXPECT_NE(text.find(part), std::string::npos) << "no \"" << part << "\" in: " << text;
}

// The message of the twobp::Error that `action` throws, or an empty string if it throws none. It must throw nothing
// else.
template <typename Action>
std::string error_of(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "not a twobp::Error: " << error.what();
  }
  return "";
}

// Runs `action`, which must throw twobp::Error (nothing else) with a message that has each of `parts` in it.
template <typename Action>
void expect_error(Action&& action, const std::vector<std::string>& parts) {
  const std::string text = error_of(std::forward<Action>(action));
  EXPECT_FALSE(text.empty()) << "no error, expected one with: " << (parts.empty() ? "" : parts.front());
  expect_contains(text, parts);
}

}  // namespace twobp::test
