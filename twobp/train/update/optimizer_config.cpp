#include "twobp/train/update/optimizer_config.h"

namespace twobp {

const Section& optimizer_section() {
  static const Section section = make_section<OptimizerConfig>(
      "optimizer",
      {TWOBP_KEY(OptimizerConfig, type, "update rule").one_of({"adamw", "adam", "sgd"}),
       TWOBP_KEY(OptimizerConfig, lr, "highest learning rate").above(0).noted_on_resume(),
       TWOBP_KEY(
           OptimizerConfig, weight_decay,
           "of matrices and kernels, not of biases and norm gains; decoupled for adamw, L2 for adam and sgd")
           .at_least(0)
           .noted_on_resume(),
       TWOBP_KEY(OptimizerConfig, weight_decay_of,
                 "PATTERN=DECAY (* and ?): the weight decay of the parameters of these names; later entries "
                 "override earlier ones")
           .noted_on_resume(),
       TWOBP_KEY(OptimizerConfig, beta1, "adam: decay of the mean gradient")
           .from_to_below(0, 1)
           .noted_on_resume(),
       TWOBP_KEY(OptimizerConfig, beta2, "adam: decay of the mean squared gradient")
           .from_to_below(0, 1)
           .noted_on_resume(),
       TWOBP_KEY(OptimizerConfig, eps, "adam: added to the denominator").above(0).noted_on_resume(),
       TWOBP_KEY(OptimizerConfig, momentum, "sgd: momentum").from_to_below(0, 1),
       TWOBP_KEY(OptimizerConfig, shard,
                 "with data_parallel: each replica keeps the optimizer state of its share of the weights "
                 "(ZeRO stage 1)")
           .free_on_resume(),
       TWOBP_KEY(OptimizerConfig, schedule, "learning rate after the warm-up")
           .one_of({"constant", "linear", "cosine"})
           .noted_on_resume(),
       TWOBP_KEY(OptimizerConfig, warmup, "length of the rise of the learning rate")
           .in("steps")
           .from(0, kMaxSteps)
           .noted_on_resume(),
       TWOBP_KEY(OptimizerConfig, min_lr, "final learning rate of linear and cosine")
           .at_least(0)
           .noted_on_resume()});
  return section;
}

}  // namespace twobp
