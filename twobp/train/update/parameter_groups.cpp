#include <algorithm>
#include <charconv>
#include <sstream>
#include <string_view>
#include <system_error>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/models/freeze.h"
#include "twobp/train/update/optimizer.h"

namespace twobp {
namespace {

std::optional<double> number_from_0(std::string_view text) {
  double number = 0;
  const auto [last, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool valid = error == std::errc() && last == text.data() + text.size();
  return valid && number >= 0 && number <= 1e6 ? std::optional(number) : std::nullopt;
}

}  // namespace

std::string last_matrix(const ModelSpec& model) {
  for (size_t i = model.layers.size(); i-- > 0;) {
    const auto layer = model.layers[i].make();  // allocates nothing
    const std::vector<Parameter*> parameters = parameters_of(*layer);
    const auto last =
        std::find_if(parameters.rbegin(), parameters.rend(), [](const Parameter* one) { return one->multiplies(); });
    if (last != parameters.rend()) return (*last)->name();
  }
  return "";
}

bool in_hidden_layer(const Parameter& parameter, const std::string& last) {
  return parameter.multiplies() && !parameter.is_table() && parameter.name() != last;
}

ParameterGroups::Group ParameterGroups::parse(const std::string& text, bool of_muon) {
  const auto refuse = [&](const std::string& why) {
    fail("optimizer.groups: \"", text, "\" ", why,
         ": write a pattern and the settings of its parameters, such as \"*.bias weight_decay=0 "
         "lr_scale=0.1\"");
  };
  Group group;
  std::istringstream words(text);
  words >> group.pattern;
  if (group.pattern.empty() || group.pattern.find('=') != std::string::npos) refuse("does not begin with a pattern");
  int settings = 0;
  for (std::string word; words >> word; ++settings) {
    const size_t equals = std::min(word.find('='), word.size());
    const std::string key = word.substr(0, equals);
    const std::string value = equals < word.size() ? word.substr(equals + 1) : "";
    if (key == "rule") {
      if (value != "adamw" && value != "muon") refuse("has a rule other than adamw and muon");
      if (!of_muon) refuse("has a rule, but optimizer.type is not \"muon\"");
      group.muon = value == "muon";
      continue;
    }
    const std::vector<std::string> keys = {"weight_decay", "lr_scale", "rule"};
    if (key != keys[0] && key != keys[1])
      refuse(concat("has \"", word, "\", which is no KEY=VALUE with one of the keys ", join(keys)));
    const auto number = number_from_0(value);
    if (!number) refuse(concat("has \"", word, "\", but the value must be a number of at least 0"));
    (key == keys[0] ? group.weight_decay : group.lr_scale) = number;
  }
  if (settings == 0) refuse("says nothing about its parameters");
  return group;
}

ParameterGroups::ParameterGroups(const OptimizerConfig& config)
    : muon_(config.type == "muon"), weight_decay_(config.weight_decay) {
  for (const std::string& text : config.groups) groups_.push_back(parse(text, muon_));
}

void ParameterGroups::check(const std::vector<std::string>& names) const {
  for (const Group& group : groups_) {
    const bool used = std::any_of(names.begin(), names.end(),
                                  [&](const std::string& name) { return matches_pattern(name, group.pattern); });
    TWOBP_CHECK(used, "optimizer.groups: no parameter is called \"", group.pattern, "\": did you mean \"",
                nearest(group.pattern, names), "\"? Patterns may have * and ?.");
  }
}

ParameterRule ParameterGroups::rule_of(const Parameter& parameter, bool hidden) const {
  const auto of = [&](const std::string& name) {
    ParameterRule rule{muon_ && hidden, parameter.decays() ? weight_decay_ : 0, 1};
    for (const Group& group : groups_) {
      if (!matches_pattern(name, group.pattern)) continue;
      rule.muon = group.muon.value_or(rule.muon);
      rule.weight_decay = group.weight_decay.value_or(rule.weight_decay);
      rule.lr_scale = group.lr_scale.value_or(rule.lr_scale);
    }
    return rule;
  };
  const ParameterRule rule = of(parameter.name());
  TWOBP_CHECK(!rule.muon || parameter.sizes().size() == 2, "optimizer.groups gives ", parameter.name(),
              " the rule muon, but it has ", parameter.sizes().size(),
              " dimensions, and Muon takes matrices: leave it to adamw");
  for (const ParameterPart& part : parameter.parts()) {
    TWOBP_CHECK(of(part.name) == rule, "optimizer.groups treats ", parameter.name(), " and ", part.name,
                " differently, but they are stored as one weight: give both the same");
  }
  return rule;
}

}  // namespace twobp
