#include "twobp/train/update/weight_decay.h"

#include <algorithm>
#include <charconv>
#include <string_view>
#include <system_error>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/models/freeze.h"

namespace twobp {
namespace {

struct DecayRule {
  std::string_view pattern;
  double decay = 0;
};

DecayRule parse_decay_rule(const std::string& text) {
  const size_t equals = text.rfind('=');
  DecayRule rule;
  bool valid = equals != std::string::npos && equals > 0;
  if (valid) {
    rule.pattern = std::string_view(text).substr(0, equals);
    const char* end = text.data() + text.size();
    const auto [last, error] = std::from_chars(text.data() + equals + 1, end, rule.decay);
    valid = error == std::errc() && last == end && rule.decay >= 0;
  }
  TWOBP_CHECK(valid, "optimizer.weight_decay_of: \"", text,
              "\" is not a pattern and its weight decay: write PATTERN=DECAY, such as *.bias=0");
  return rule;
}

}  // namespace

void check_decay_rules(const OptimizerConfig& config) {
  for (const std::string& text : config.weight_decay_of) parse_decay_rule(text);
}

void check_decay_rules(const OptimizerConfig& config, const std::vector<std::string>& names) {
  for (const std::string& text : config.weight_decay_of) {
    const std::string_view pattern = parse_decay_rule(text).pattern;
    const bool used = std::any_of(names.begin(), names.end(),
                                  [&](const std::string& name) { return matches_pattern(name, pattern); });
    TWOBP_CHECK(used, "optimizer.weight_decay_of: no parameter is called \"", pattern, "\": did you mean \"",
                nearest(pattern, names), "\"? Patterns may have * and ?.");
  }
}

double weight_decay_of(const OptimizerConfig& config, const Parameter& parameter) {
  const auto of = [&](const std::string& name) {
    double decay = parameter.decays() ? config.weight_decay : 0;
    for (const std::string& text : config.weight_decay_of) {
      const DecayRule rule = parse_decay_rule(text);
      if (matches_pattern(name, rule.pattern)) decay = rule.decay;
    }
    return decay;
  };
  const double decay = of(parameter.name());
  for (const ParameterPart& part : parameter.parts()) {
    TWOBP_CHECK(of(part.name) == decay, "optimizer.weight_decay_of gives ", parameter.name(), " ", decay,
                ", but ", part.name, " ", of(part.name),
                ": they are stored as one weight, so give both the same");
  }
  return decay;
}

}  // namespace twobp
