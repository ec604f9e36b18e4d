#include "twobp/models/freeze.h"

#include <algorithm>
#include <functional>
#include <map>
#include <set>

#include "twobp/core/check.h"
#include "twobp/core/text.h"

namespace twobp {
namespace {

using Rule = std::function<bool(const std::string& name)>;

bool frozen(const Parameter& parameter, const Rule& rule) {
  std::vector<std::string> in;
  std::vector<std::string> out;
  for (const auto& part : parameter.parts()) (rule(part.name) ? in : out).push_back(part.name);
  TWOBP_CHECK(in.empty() || out.empty(), "model.freeze matches ", join(in), " but not ", join(out),
              ": they are stored as one weight, so freeze all of them or none");
  return out.empty();
}

void check_patterns(const ModelSpec& model, const std::vector<std::string>& patterns) {
  std::vector<std::string> names;
  for (const LayerSpec& spec : model.layers) {
    const auto layer = spec.make();
    for (const Parameter* parameter : parameters_of(*layer)) {
      for (const auto& part : parameter->parts()) names.push_back(part.name);
    }
  }
  for (const std::string& pattern : patterns) {
    const bool used = std::any_of(names.begin(), names.end(),
                                  [&](const std::string& name) { return matches_pattern(name, pattern); });
    TWOBP_CHECK(used, "model.freeze: no parameter is called \"", pattern, "\": did you mean \"",
                nearest(pattern, names), "\"? Patterns may have * and ?.");
  }
}

void freeze_by(ModelSpec& model, const Rule& rule) {
  model.first_trainable = static_cast<int>(model.layers.size());
  bool counts = false, corrects = false;
  for (size_t i = 0; i < model.layers.size(); ++i) {
    LayerSpec& spec = model.layers[i];
    spec.make = [make = spec.make, rule] {
      auto layer = make();
      for (Parameter* parameter : parameters_of(*layer)) {
        // Buffers are not trainable.
        if ((parameter->trainable() || parameter->is_corrected()) && frozen(*parameter, rule)) parameter->freeze();
      }
      return layer;
    };
    const auto layer = spec.make();
    std::string which;
    for (const Parameter* parameter : parameters_of(*layer)) {
      if (!parameter->is_buffer()) which += parameter->trainable() ? '1' : '0';
      counts |= parameter->counts_tokens();
      corrects |= parameter->is_corrected();
    }
    if (which.find('0') != std::string::npos) spec.kind += ", trained " + which;
    const bool any = which.find('1') != std::string::npos;
    if (any && model.first_trainable == static_cast<int>(model.layers.size())) {
      model.first_trainable = static_cast<int>(i);
    }
  }
  TWOBP_CHECK(corrects || !counts,
              "model.balance_rate is above 0, but model.freeze or model.lora freezes the biases of "
              "all routers: set it to 0, or leave them out of model.freeze");
}

}  // namespace

bool matches_pattern(std::string_view name, std::string_view pattern) {
  // The position after the last *. Each time the rest does not match, the * takes one more character.
  size_t star = std::string_view::npos;
  size_t taken = 0;
  size_t n = 0;
  size_t p = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      taken = n;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == name[n])) {
      ++p;
      ++n;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      n = ++taken;
    } else {
      return false;
    }
  }
  return std::all_of(pattern.begin() + static_cast<std::ptrdiff_t>(p), pattern.end(), [](char c) { return c == '*'; });
}

void freeze(ModelSpec& model, const std::vector<std::string>& patterns) {
  if (patterns.empty()) return;
  check_patterns(model, patterns);
  freeze_by(model, [patterns](const std::string& name) {
    return std::any_of(patterns.begin(), patterns.end(),
                       [&](const std::string& pattern) { return matches_pattern(name, pattern); });
  });
}

bool names_experts(const std::string& target) {
  const size_t dot = target.rfind('.');
  if (dot == std::string::npos) return false;
  const std::string module = target.substr(0, dot);
  return module == "experts" || module.ends_with(".experts");
}

void check_lora_targets(const ModelSpec& model, const LoraOptions& lora) {
  std::map<std::string, int> uses;    // by parameter
  std::set<std::string> projections;  // last parts of the matrices' names
  std::set<std::string> adapted;      // modules
  std::set<std::string> stacks;       // of experts, adapted
  bool experts = false;
  for (const LayerSpec& spec : model.layers) {
    const auto layer = spec.make();
    for (const Parameter* parameter : parameters_of(*layer)) {
      experts |= parameter->experts() > 0;
      for (const auto& part : parameter->parts()) {
        const std::string module = module_of(part.name);
        if (is_adapter(part.name)) {
          const std::string base = module.substr(0, module.rfind('.'));
          if (parameter->experts() > 0) {
            stacks.insert(base.substr(0, base.rfind('.')));  // without the expert's number
          } else {
            adapted.insert(base);
          }
        } else if (parameter->decays()) {
          ++uses[module];
          projections.insert(module.substr(module.rfind('.') + 1));
        }
      }
    }
  }
  for (const std::string& module : adapted) {
    TWOBP_CHECK(uses[module] == 1, "model.lora_targets: ", module,
                " is both the input and the output embedding: one adapter can't serve both, leave it out");
  }
  adapted.merge(stacks);
  const std::vector<std::string> known(projections.begin(), projections.end());
  for (const std::string& target : lora.targets) {
    const bool used = std::any_of(adapted.begin(), adapted.end(), [&](const std::string& module) {
      return module == target || module.ends_with("." + target);
    });
    TWOBP_CHECK(used || experts || !names_experts(target), "model.lora_targets: ", target,
                " is a tensor of experts, but the model has none: name projections: ", join(known));
    TWOBP_CHECK(used || !projections.contains(target.substr(target.rfind('.') + 1)), "model.lora_targets: ", target,
                " takes no adapter here: it is an embedding, a convolution or an output without one");
    TWOBP_CHECK(used, "model.lora_targets: no projection is called \"", target, "\": did you mean \"",
                nearest(target, known), "\"? There are ", join(known));
  }
}

void freeze_all_but_lora(ModelSpec& model) {
  freeze_by(model, [](const std::string& name) { return !is_adapter(name); });
}

}  // namespace twobp
