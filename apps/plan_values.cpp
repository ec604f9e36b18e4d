// The values of options of `twobp plan`: counts, names and costs, and the files that options name.

#include <algorithm>
#include <charconv>
#include <system_error>

#include "apps/plan.h"
#include "twobp/core/check.h"
#include "twobp/core/text.h"

namespace twobp {
namespace {

constexpr int kMostCount = 1 << 20;

int parse_number(const std::string& option, const std::string& text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = error != std::errc::invalid_argument && end == text.data() + text.size();
  TWOBP_CHECK(whole, option, ": '", text, "' is not a whole number: give numbers as 4, 2,4,8 or 2..8");
  TWOBP_CHECK(error == std::errc() && value >= 1 && value <= kMostCount, option, " must be at least 1 and at most ",
              kMostCount, ", got ", text);
  return value;
}

}  // namespace

std::vector<int> parse_counts(const std::string& option, const std::string& text) {
  std::vector<int> values;
  const auto add = [&](int value) {
    if (std::find(values.begin(), values.end(), value) == values.end()) values.push_back(value);
  };
  for (const auto& part : split(text, ',')) {
    const size_t dots = part.find("..");
    if (dots == std::string::npos) {
      add(parse_number(option, part));
      continue;
    }
    const int first = parse_number(option, part.substr(0, dots));
    const int last = parse_number(option, part.substr(dots + 2));
    TWOBP_CHECK(first <= last, option, ": the range '", part, "' is empty: the first number is the smaller");
    TWOBP_CHECK(last - first < 10000, option, ": the range '", part, "' has over 10000 numbers");
    for (int value = first; value <= last; ++value) add(value);
  }
  TWOBP_CHECK(!values.empty(), option, " is empty: give numbers as 4, 2,4,8 or 2..8");
  return values;
}

int parse_count(const std::string& option, const std::string& text) {
  const auto values = parse_counts(option, text);
  TWOBP_CHECK(values.size() == 1, option, ": '", text,
              "' has several numbers, but a single schedule takes one: give a configuration file to compare them");
  return values[0];
}

std::vector<std::string> parse_names(const std::string& option, const std::string& text) {
  std::vector<std::string> names;
  for (const auto& name : split(text, ',')) {
    TWOBP_CHECK(!name.empty(), option, " '", text, "' has an empty entry");
    names.push_back(name);
  }
  return names;
}

void write_output(const std::string& option, const std::string& path, const std::string& text) {
  try {
    write_text(path, text);
  } catch (const Error& error) {
    fail(option, ": ", error.what());
  }
}

std::vector<double> parse_costs(const std::string& option, const std::string& text, int stages) {
  std::vector<double> values;
  for (const auto& part : split(text, ',')) {
    double value = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), value);
    TWOBP_CHECK(error == std::errc() && end == part.data() + part.size() && value >= 0 && value <= kMostCost, option,
                ": '", part, "' is not a cost: give a number from 0 to ", kMostCost);
    values.push_back(value);
  }
  TWOBP_CHECK(values.size() == 1 || static_cast<int>(values.size()) == stages, option, " has ", values.size(),
              " values: give one, or one for each of the ", stages, " stages");
  if (values.size() == 1) values.resize(stages, values[0]);
  return values;
}

}  // namespace twobp
