// Runs two training steps with the installed library.
#include <cstdio>
#include <twobp/twobp.h>

int main() {
  twobp::Config config;
  config.model.type.as<twobp::DecoderOptions>().dim = 32;
  config.data.synthetic = "tokens";
  config.data.sequence = 16;
  config.data.held_out = 0;
  config.train.steps = 2;
  twobp::Trainer trainer(config);
  double loss = 0;
  while (trainer.steps_done() < config.train.steps) loss = trainer.step().loss;
  std::printf("loss %.3f\n", loss);
  return loss > 0 ? 0 : 1;
}
