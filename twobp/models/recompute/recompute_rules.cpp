#include "twobp/models/recompute/recompute_rules.h"

#include <charconv>
#include <numeric>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/models/freeze.h"

namespace twobp {
namespace {

constexpr std::string_view kStage = "stage:";

int parse_stage(std::string_view number, const std::string& text) {
  int stage = -1;
  const auto [end, status] = std::from_chars(number.data(), number.data() + number.size(), stage);
  TWOBP_CHECK(status == std::errc() && end == number.data() + number.size() && stage >= 0, "\"", text,
              "\" has no stage number: write stage:0=MODE");
  return stage;
}

// The layers [first, end) of a stage.
std::pair<size_t, size_t> layers_of(int stage, const std::vector<int>& split) {
  TWOBP_CHECK(!split.empty(), "stage:", stage, " needs the layers of each stage, which are not given");
  TWOBP_CHECK(static_cast<size_t>(stage) < split.size(), "stage:", stage, " does not exist: the ", split.size(),
              " stages are 0 to ", split.size() - 1);
  const auto at = split.begin() + stage;
  const int first = std::accumulate(split.begin(), at, 0);
  return {first, first + *at};
}

}  // namespace

RecomputeRule parse_recompute_rule(const std::string& text) {
  RecomputeRule rule;
  const size_t equals = text.rfind('=');
  if (equals == std::string::npos) {
    rule.mode = parse_recompute(text);
    return rule;
  }
  rule.mode = parse_recompute(std::string_view(text).substr(equals + 1));
  const std::string_view which = std::string_view(text).substr(0, equals);
  TWOBP_CHECK(!which.empty(), "\"", text, "\" names no layers: write MODE, stage:N=MODE or PATTERN=MODE");
  if (which.starts_with(kStage)) {
    rule.stage = parse_stage(which.substr(kStage.size()), text);
  } else {
    rule.pattern = which;
  }
  return rule;
}

std::vector<Recompute> modes_by_layer(const ModelSpec& model, const std::vector<RecomputeRule>& rules,
                                      const std::vector<int>& split) {
  const size_t layers = model.layers.size();
  std::vector<Recompute> modes(layers, Recompute::kNone);
  for (const RecomputeRule& rule : rules) {
    if (!rule.pattern.empty()) {
      std::vector<std::string> names;
      bool used = false;
      for (size_t i = 0; i < layers; ++i) {
        names.push_back(model.layers[i].name);
        if (!matches_pattern(names.back(), rule.pattern)) continue;
        modes[i] = rule.mode;
        used = true;
      }
      TWOBP_CHECK(used, "no layer is called \"", rule.pattern, "\": did you mean \"", nearest(rule.pattern, names),
                  "\"? Patterns may have * and ?");
      continue;
    }
    const auto [first, end] = rule.stage < 0 ? std::pair<size_t, size_t>{0, layers} : layers_of(rule.stage, split);
    for (size_t i = std::max<size_t>(first, 1); i < std::min(end, layers - 1); ++i) modes[i] = rule.mode;
  }
  return modes;
}

void recompute(ModelSpec& model, const std::vector<Recompute>& modes) {
  TWOBP_CHECK(modes.size() == model.layers.size(), "a model of ", model.layers.size(),
              " layers needs as many modes of recomputation, got ", modes.size());
  for (size_t i = 0; i < modes.size(); ++i) {
    if (modes[i] == Recompute::kNone) continue;
    LayerSpec& spec = model.layers[i];
    spec.kind += concat('+', recompute_name(modes[i]));
    spec.make = [make = spec.make, mode = modes[i]] { return std::make_unique<RecomputeLayer>(make(), mode); };
  }
}

}  // namespace twobp
