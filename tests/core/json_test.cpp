// Tests how JSON text from outside is checked: which text is refused, and the error messages.
#include "twobp/core/json.h"

#include "tests/expect_error.h"

namespace twobp::TWOBP_FILE {
namespace {

using nlohmann::json;
using test::expect_error;

json parse(const std::string& text, int max_depth = 3) {
  return parse_json<json>(text, "mine", max_depth);
}

TEST(JsonText, RefusesRepeatedKeysInAnObject) {
  EXPECT_EQ(parse(R"({"a": {"b": 1}, "b": {"b": 2}})").at("b").at("b"), 2);
  expect_error([] { parse(R"({"a": 1, "b": {"c": 2}, "a": 3})"); }, {"mine", "\"a\" is there twice"});
  expect_error([] { parse(R"({"b": {"c": 2, "c": 3}})"); }, {"\"c\" is there twice"});
}

TEST(JsonText, BoundsTheDepth) {
  EXPECT_EQ(parse("[[[]]]").size(), 1U);
  expect_error([] { parse("[[[[]]]]", 2); }, {"mine", "deeper than 2"});
}

TEST(JsonText, ShortensTheBadTextInTheMessage) {
  try {
    parse("{\"a\": " + std::string(5000, 'x'));
    ADD_FAILURE();
  } catch (const Error& error) {
    const std::string what = error.what();
    test::expect_contains(what, {"mine: not JSON: parse error"});
    EXPECT_EQ(what.find("[json"), std::string::npos) << what;
    EXPECT_LT(what.size(), 300U);
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
