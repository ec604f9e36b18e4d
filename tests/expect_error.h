// For tests of errors: what an action must throw, and what its message must say.
#pragma once

#include <exception>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "twobp/core/check.h"

namespace twobp::test {

// `text` has each of `parts` in it.
inline void expect_contains(const std::string& text, const std::vector<std::string>& parts) {
  for (const auto& part : parts) EXPECT_NE(text.find(part), std::string::npos) << "no \"" << part << "\" in: " << text;
}

// Runs `action`, which must throw twobp::Error (nothing else) with a message that has each of `parts` in it.
template <typename Action>
void expect_error(Action&& action, const std::vector<std::string>& parts) {
  try {
    action();
  } catch (const Error& error) {
    expect_contains(error.what(), parts);
    return;
  } catch (const std::exception& error) {
    ADD_FAILURE() << "not a twobp::Error: " << error.what();
    return;
  }
  ADD_FAILURE() << "no error, expected one with: " << (parts.empty() ? "" : parts.front());
}

}  // namespace twobp::test
