// How the optimizer treats each parameter: with optimizer.weight_decay if it is a matrix or kernel, and with none if it
// is a bias or norm gain, unless optimizer.groups says otherwise for its name.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "twobp/models/model.h"
#include "twobp/nn/parameter.h"
#include "twobp/train/update/optimizer_config.h"

namespace twobp {

// The name of the matrix that multiplies last. Empty if none does.
std::string last_matrix(const ModelSpec& model);
// Whether Muon takes the parameter: a matrix that multiplies, is no table, and is not `last`.
bool in_hidden_layer(const Parameter& parameter, const std::string& last);

struct ParameterRule {
  bool muon = false;  // in place of AdamW
  double weight_decay = 0;
  double lr_scale = 1;  // of the learning rate

  bool operator==(const ParameterRule&) const = default;
};

// The entries of optimizer.groups, in order.
class ParameterGroups {
 public:
  // Throws Error for entries that are not PATTERN KEY=VALUE...
  explicit ParameterGroups(const OptimizerConfig& config);

  // Throws Error if a pattern matches none of the names.
  void check(const std::vector<std::string>& names) const;
  // `hidden`: see in_hidden_layer. Throws Error if the
  // parts of a packed weight get different rules, and if a group gives Muon a parameter that is no matrix.
  ParameterRule rule_of(const Parameter& parameter, bool hidden) const;

 private:
  // An entry of optimizer.groups. Settings that it does not mention stay as they are.
  struct Group {
    std::string pattern;
    std::optional<double> weight_decay, lr_scale;
    std::optional<bool> muon;
  };
  static Group parse(const std::string& text, bool of_muon);

  bool muon_;
  double weight_decay_;
  std::vector<Group> groups_;
};

}  // namespace twobp
