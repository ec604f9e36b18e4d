#include "twobp/train/update/optimizer_config.h"

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

}  // namespace twobp
