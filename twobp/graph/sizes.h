// The numbers that programs for many shapes of a micro-batch compute from the sizes of its fields: sizes of tensors,
// ends of slices, divisors. They are computed once for each new shape, not for each operator.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "twobp/core/json.h"
#include "twobp/graph/program.h"

namespace twobp::graph {

inline constexpr size_t kMostSizes = 10'000;

class Sizes {
 public:
  // A whole number, or a real one.
  struct Number {
    bool real = false;
    int64_t whole = 0;  // 0 or 1: whether a condition holds
    double value = 0;

    static Number of(int64_t number) { return {false, number, 0}; }
    static Number of_real(double number) { return {true, 0, number}; }
    double as_real() const;  // throws Error if a double does not hold the number
    bool holds() const { return real ? value != 0 : whole != 0; }
  };

  Sizes() = default;
  // Reads the list. Every entry refers to earlier ones only. Throws Error.
  Sizes(const JsonNode& list, const FieldTypes& fields);

  size_t count() const { return entries_.size(); }
  bool is_real(size_t entry) const { return entries_[entry].real; }
  // The numbers for a micro-batch. Throws Error for an overflow, a division by zero, and a number that is not finite.
  std::vector<Number> of(const FieldTypes& batch) const;

 private:
  enum class Do : uint8_t {
    kField,
    kNumber,
    kAdd,
    kMultiply,
    kFloorDivide,
    kModulo,
    kMaximum,
    kMinimum,
    kPower,
    kDivide,
    kReal,
    kRoot,
    kEqual,
    kUnequal,
    kLess,
    kLessOrEqual,
    kGreater,
    kGreaterOrEqual,
    kAnd,
    kOr,
    kNot,
  };
  struct Entry {
    Do what = Do::kNumber;
    bool real = false;
    Number number;
    std::string field;
    size_t dimension = 0;
    size_t a = 0, b = 0;  // earlier entries
    std::string place;
  };
  struct Operation;
  static const Operation& operation_of(const JsonNode& name);
  static Number compute(const Entry& entry, const Number& a, const Number& b);

  std::vector<Entry> entries_;
};

}  // namespace twobp::graph
