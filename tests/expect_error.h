// For tests of errors: what an action must throw, and what its message must say.
#pragma once

#include <exception>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "twobp/core/check.h"

namespace twobp::test {

// Runs `action`, which must throw twobp::Error (nothing else) with a message that has each of `parts` in it.
template <typename Action>
void expect_error(Action&& action, const std::vector<std::string>& parts) {
  try {
    action();
  } catch (const Error& error) {
    const std::string what = error.what();
    for (const auto& part : parts) {
      EXPECT_NE(what.find(part), std::string::npos) << "no \"" << part << "\" in: " << what;
    }
    return;
  } catch (const std::exception& error) {
    ADD_FAILURE() << "not a twobp::Error: " << error.what();
    return;
  }
  ADD_FAILURE() << "no error, expected one with: " << (parts.empty() ? "" : parts.front());
}

}  // namespace twobp::test
