#include <cmath>
#include <utility>

#include "twobp/config/section.h"
#include "twobp/core/check.h"
#include "twobp/core/text.h"

namespace twobp {
namespace {

struct TypeName {
  std::string_view operator()(const bool*) const { return "boolean"; }
  std::string_view operator()(const int*) const { return "integer"; }
  std::string_view operator()(const int64_t*) const { return "integer"; }
  std::string_view operator()(const uint64_t*) const { return "integer"; }
  std::string_view operator()(const double*) const { return "number"; }
  std::string_view operator()(const std::string*) const { return "text"; }
  std::string_view operator()(const std::vector<int>*) const { return "list of integers"; }
  std::string_view operator()(const std::vector<std::string>*) const { return "list of texts"; }
  std::string_view operator()(const std::vector<double>*) const { return "list of numbers"; }
  std::string_view operator()(const Choice*) const { return "text"; }
};

}  // namespace

bool Allowed::contains(double value) const {
  if (!std::isfinite(value)) return false;
  return (above_min ? value > min : value >= min) && (below_max ? value < max : value <= max);
}

std::string Allowed::text() const {
  if (!choices.empty()) {
    return "one of " + join(choices) + (file.empty() ? "" : ", or a file that ends in " + file);
  }
  // Formats 16777216 as such and not as 1.67772e+07.
  const auto number = [](double value) {
    return value == std::floor(value) ? std::to_string(static_cast<long long>(value)) : concat(value);
  };
  std::string out;
  if (std::isfinite(min)) {
    out = (above_min ? "above " : std::isfinite(max) ? "from " : "at least ") + number(min);
  }
  if (std::isfinite(max)) out += (below_max ? " to below " : " to ") + number(max);
  return out;
}

std::string_view type_name(const Field& field) {
  return std::visit(TypeName{}, field);
}

Key Key::in(std::string text) && {
  unit = std::move(text);
  return std::move(*this);
}

Key Key::from(double min, double max) && {
  allowed.min = min;
  allowed.max = max;
  return std::move(*this);
}

Key Key::from_to_below(double min, double max) && {
  allowed.below_max = true;
  return std::move(*this).from(min, max);
}

Key Key::above_to(double min, double max) && {
  allowed.above_min = true;
  return std::move(*this).from(min, max);
}

Key Key::at_least(double min) && {
  allowed.min = min;
  return std::move(*this);
}

Key Key::above(double min) && {
  allowed.above_min = true;
  return std::move(*this).at_least(min);
}

Key Key::one_of(std::vector<std::string> choices) && {
  allowed.choices = std::move(choices);
  return std::move(*this);
}

Key Key::or_file(std::string ending) && {
  allowed.file = std::move(ending);
  return std::move(*this);
}

Key Key::noted_on_resume() && {
  on_resume = OnResume::kNoted;
  return std::move(*this);
}

Key Key::free_on_resume() && {
  on_resume = OnResume::kFree;
  return std::move(*this);
}

Key Key::differs_by_process() && {
  per_process = true;
  return std::move(*this);
}

Key Key::path() && {
  per_process = true;
  return std::move(*this).free_on_resume();
}

Key Key::freely_tuned() && {
  tunable = true;
  return std::move(*this);
}

}  // namespace twobp
