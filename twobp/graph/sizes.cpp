#include "twobp/graph/sizes.h"

#include <algorithm>
#include <cmath>

#include "twobp/core/check.h"

namespace twobp::graph {
namespace {

constexpr int64_t kMostExact = int64_t{1} << 53;  // whole numbers up to here are doubles
constexpr int64_t kMostPower = 64;

int64_t floor_divide(int64_t a, int64_t b) {
  TWOBP_CHECK(b != 0, "divides by zero");
  TWOBP_CHECK(a != INT64_MIN || b != -1, "is too large");
  return a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0);
}

int64_t times(int64_t a, int64_t b) {
  int64_t result = 0;
  TWOBP_CHECK(!__builtin_mul_overflow(a, b, &result), "is too large");
  return result;
}

int64_t plus(int64_t a, int64_t b) {
  int64_t result = 0;
  TWOBP_CHECK(!__builtin_add_overflow(a, b, &result), "is too large");
  return result;
}

int64_t power(int64_t base, int64_t exponent) {
  TWOBP_CHECK(exponent >= 0 && exponent <= kMostPower, "has the exponent ", exponent, ", outside 0 to ", kMostPower);
  int64_t result = 1;
  for (int64_t i = 0; i < exponent; ++i) result = times(result, base);
  return result;
}

double finite(double number) {
  TWOBP_CHECK(std::isfinite(number), "is not finite");
  return number;
}

}  // namespace

struct Sizes::Operation {
  const char* name;
  Do what;
  int arguments;
  enum class Gives : uint8_t { kWhole, kReal, kAsArguments } gives;
};

double Sizes::Number::as_real() const {
  if (real) return value;
  TWOBP_CHECK(whole >= -kMostExact && whole <= kMostExact, "is too large for a real number");
  return static_cast<double>(whole);
}

const Sizes::Operation& Sizes::operation_of(const JsonNode& name) {
  using Gives = Operation::Gives;
  static constexpr Operation kAll[] = {
      {"add", Do::kAdd, 2, Gives::kAsArguments},
      {"mul", Do::kMultiply, 2, Gives::kAsArguments},
      {"floordiv", Do::kFloorDivide, 2, Gives::kWhole},
      {"mod", Do::kModulo, 2, Gives::kWhole},
      {"max", Do::kMaximum, 2, Gives::kAsArguments},
      {"min", Do::kMinimum, 2, Gives::kAsArguments},
      {"pow", Do::kPower, 2, Gives::kAsArguments},
      {"truediv", Do::kDivide, 2, Gives::kReal},
      {"float", Do::kReal, 1, Gives::kReal},
      {"sqrt", Do::kRoot, 1, Gives::kReal},
      {"eq", Do::kEqual, 2, Gives::kWhole},
      {"ne", Do::kUnequal, 2, Gives::kWhole},
      {"lt", Do::kLess, 2, Gives::kWhole},
      {"le", Do::kLessOrEqual, 2, Gives::kWhole},
      {"gt", Do::kGreater, 2, Gives::kWhole},
      {"ge", Do::kGreaterOrEqual, 2, Gives::kWhole},
      {"and", Do::kAnd, 2, Gives::kWhole},
      {"or", Do::kOr, 2, Gives::kWhole},
      {"not", Do::kNot, 1, Gives::kWhole},
  };
  const auto* found =
      std::find_if(std::begin(kAll), std::end(kAll), [&](const Operation& one) { return name.text() == one.name; });
  if (found == std::end(kAll)) name.refuse("\"", name.text().substr(0, 100), "\" is not a known operation");
  return *found;
}

Sizes::Sizes(const JsonNode& list, const FieldTypes& fields) {
  for (const JsonNode& node : list.elements(kMostSizes)) {
    Entry entry;
    entry.place = node.place();
    if (const auto name = node.find("field")) {
      entry.what = Do::kField;
      entry.field = name->text();
      const auto field = fields.find(entry.field);
      if (field == fields.end()) name->refuse("the shape has no field \"", entry.field, "\"");
      const auto dimensions = static_cast<int64_t>(field->second.sizes.size());
      if (dimensions == 0) name->refuse("the field \"", entry.field, "\" has no dimension");
      entry.dimension = static_cast<size_t>(node["dim"].integer(0, dimensions - 1));
    } else if (const auto number = node.find("number")) {
      if (number->value().is_boolean()) {
        entry.number = Number::of(number->boolean() ? 1 : 0);
      } else if (number->value().is_number_float()) {
        entry.number = Number::of_real(number->value().get<double>());
        if (!std::isfinite(entry.number.value)) number->refuse("is not finite");
      } else {
        entry.number = Number::of(number->integer(INT64_MIN, INT64_MAX));
      }
      entry.real = entry.number.real;
    } else {
      const Operation& operation = operation_of(node["do"]);
      entry.what = operation.what;
      const JsonNode of = node["of"];
      std::vector<size_t> arguments;
      for (const JsonNode& one : of.elements(2))
        arguments.push_back(static_cast<size_t>(one.integer(0, static_cast<int64_t>(entries_.size()) - 1)));
      if (static_cast<int>(arguments.size()) != operation.arguments)
        of.refuse("has ", arguments.size(), " entries, but \"", operation.name, "\" takes ", operation.arguments);
      entry.a = arguments.front();
      entry.b = arguments.back();
      const bool real = entries_[entry.a].real || entries_[entry.b].real;
      if (real && (entry.what == Do::kFloorDivide || entry.what == Do::kModulo))
        of.refuse("\"", operation.name, "\" takes whole numbers");
      entry.real =
          operation.gives == Operation::Gives::kReal || (operation.gives == Operation::Gives::kAsArguments && real);
    }
    entries_.push_back(std::move(entry));
  }
}

Sizes::Number Sizes::compute(const Entry& entry, const Number& a, const Number& b) {
  const bool real = a.real || b.real;
  const auto condition = [&](const auto& holds) {
    return Number::of(real ? holds(a.as_real(), b.as_real()) : holds(a.whole, b.whole));
  };
  const auto number = [&](const auto& of_whole, const auto& of_real) {
    return real ? Number::of_real(finite(of_real(a.as_real(), b.as_real()))) : Number::of(of_whole(a.whole, b.whole));
  };
  const auto larger = [](auto x, auto y) { return std::max(x, y); };
  const auto smaller = [](auto x, auto y) { return std::min(x, y); };
  switch (entry.what) {
    case Do::kField:
    case Do::kNumber:
      return a;
    case Do::kAdd:
      return number(plus, std::plus<>());
    case Do::kMultiply:
      return number(times, std::multiplies<>());
    case Do::kFloorDivide:
      return Number::of(floor_divide(a.whole, b.whole));
    case Do::kModulo: {
      const int64_t quotient = floor_divide(a.whole, b.whole);
      return Number::of(a.whole - quotient * b.whole);
    }
    case Do::kMaximum:
      return number(larger, larger);
    case Do::kMinimum:
      return number(smaller, smaller);
    case Do::kPower:
      return number(power, [](double x, double y) { return std::pow(x, y); });
    case Do::kDivide:
      TWOBP_CHECK(b.as_real() != 0, "divides by zero");
      return Number::of_real(finite(a.as_real() / b.as_real()));
    case Do::kReal:
      return Number::of_real(a.as_real());
    case Do::kRoot:
      return Number::of_real(finite(std::sqrt(a.as_real())));
    case Do::kEqual:
      return condition(std::equal_to<>());
    case Do::kUnequal:
      return condition(std::not_equal_to<>());
    case Do::kLess:
      return condition(std::less<>());
    case Do::kLessOrEqual:
      return condition(std::less_equal<>());
    case Do::kGreater:
      return condition(std::greater<>());
    case Do::kGreaterOrEqual:
      return condition(std::greater_equal<>());
    case Do::kAnd:
      return Number::of(a.holds() && b.holds());
    case Do::kOr:
      return Number::of(a.holds() || b.holds());
    case Do::kNot:
      return Number::of(!a.holds());
  }
  fail("unknown operation");
}

std::vector<Sizes::Number> Sizes::of(const FieldTypes& batch) const {
  std::vector<Number> numbers;
  numbers.reserve(entries_.size());
  for (const Entry& entry : entries_) {
    if (entry.what == Do::kField) {
      numbers.push_back(Number::of(batch.at(entry.field).sizes.at(entry.dimension)));
    } else if (entry.what == Do::kNumber) {
      numbers.push_back(entry.number);
    } else {
      try {
        numbers.push_back(compute(entry, numbers[entry.a], numbers[entry.b]));
      } catch (const Error& error) {
        fail(entry.place, ": the number ", error.what());
      }
    }
  }
  return numbers;
}

}  // namespace twobp::graph
