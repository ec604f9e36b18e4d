#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>
#include <vector>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/train/config.h"
#include "twobp/train/update/rates.h"

namespace twobp {

const Section& optimizer_section() {
  static const Section section = make_section<OptimizerConfig>(
      "optimizer",
      {TWOBP_KEY(OptimizerConfig, type,
                 "update rule; muon: Muon for the matrices of hidden layers, and AdamW for the rest")
           .one_of({"adamw", "adam", "sgd", "muon"}),
       TWOBP_KEY(OptimizerConfig, lr, "highest learning rate").above(0).noted_on_resume(),
       TWOBP_KEY(OptimizerConfig, weight_decay,
                 "weight decay of matrices and kernels, not of biases and norm gains; decoupled for adamw "
                 "and muon, L2 for adam and sgd")
           .at_least(0)
           .noted_on_resume(),
       TWOBP_KEY(OptimizerConfig, groups,
                 "PATTERN KEY=VALUE...: settings of the parameters whose names match (* and ?): "
                 "weight_decay, lr_scale (a factor of lr), rule (adamw or muon, if the type is muon); later "
                 "entries override earlier ones")
           .noted_on_resume(),
       TWOBP_KEY(OptimizerConfig, beta1, "adam, adamw, muon: decay of the mean gradient")
           .from_to_below(0, 1)
           .noted_on_resume(),
       TWOBP_KEY(OptimizerConfig, beta2, "adam, adamw, muon: decay of the mean squared gradient")
           .from_to_below(0, 1)
           .noted_on_resume(),
       TWOBP_KEY(OptimizerConfig, eps, "adam, adamw, muon: added to the denominator").above(0).noted_on_resume(),
       TWOBP_KEY(OptimizerConfig, momentum, "sgd: momentum").from_to_below(0, 1),
       TWOBP_KEY(OptimizerConfig, muon_momentum, "muon: momentum").from_to_below(0, 1).noted_on_resume(),
       TWOBP_KEY(OptimizerConfig, average,
                 "decay of a running mean of the weights, which evaluation and saving use in their place; 0: "
                 "none")
           .from_to_below(0, 1),
       TWOBP_KEY(OptimizerConfig, shard,
                 "with data_parallel: each replica keeps the optimizer state of its share of the weights "
                 "(ZeRO stage 1)")
           .free_on_resume(),
       TWOBP_KEY(OptimizerConfig, schedule, "learning rate after the warm-up")
           .one_of({"constant", "linear", "cosine", "wsd", "inverse_sqrt"})
           .noted_on_resume(),
       TWOBP_KEY(OptimizerConfig, warmup, "length of the rise of the learning rate")
           .in("steps")
           .from(0, kMaxSteps)
           .noted_on_resume(),
       TWOBP_KEY(OptimizerConfig, decay, "wsd: length of the fall at the end of the run; 0: a tenth of train.steps")
           .in("steps")
           .from(0, kMaxSteps)
           .noted_on_resume(),
       TWOBP_KEY(OptimizerConfig, min_lr, "final learning rate of linear, cosine and wsd")
           .at_least(0)
           .noted_on_resume()});
  return section;
}

// The formulas of the header.
double learning_rate(const OptimizerConfig& config, int64_t step, int64_t total_steps) {
  TWOBP_CHECK(step >= 0, "learning_rate: step ", step, ", but steps are counted from 0.");
  const std::vector<std::string> known = {"constant", "linear", "cosine", "wsd", "inverse_sqrt"};
  const std::string& schedule = config.schedule;
  TWOBP_CHECK(std::find(known.begin(), known.end(), schedule) != known.end(), "optimizer.schedule is \"", schedule,
              "\", which is unknown: did you mean \"", nearest(schedule, known), "\"?");
  if (step < config.warmup) {
    return config.lr * static_cast<double>(step + 1) / static_cast<double>(config.warmup + 1);
  }
  if (schedule == "constant") return config.lr;
  if (schedule == "inverse_sqrt") {
    const auto time = static_cast<double>(config.warmup > 0 ? config.warmup : 10000);
    return config.lr * std::sqrt(time / (time + static_cast<double>(step - config.warmup)));
  }
  int64_t begin = config.warmup;
  if (schedule == "wsd") {
    const int64_t decay = config.decay > 0 ? config.decay : std::max<int64_t>(1, total_steps / 10);
    begin = std::max(begin, total_steps - decay);
  }
  const auto done = static_cast<double>(std::max<int64_t>(step - begin, 0));
  const auto steps = static_cast<double>(std::max<int64_t>(total_steps - begin, 1));
  const double p = std::min(done / steps, 1.0);
  if (schedule == "cosine")
    return config.min_lr + (config.lr - config.min_lr) * (1 + std::cos(std::numbers::pi * p)) / 2;
  return config.lr + (config.min_lr - config.lr) * p;
}

}  // namespace twobp
