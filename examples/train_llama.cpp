// Trains from C++: a small LLaMa on this source file, over two pipeline stages, with an observer that sees the course
// of each step.
//
//   build/release/examples/train_llama [TEXT FILE]
#include <cstdio>
#include <memory>

#include "twobp/twobp.h"

namespace {

class Printer : public twobp::Observer {
 public:
  void on_step(const twobp::StepReport& report) override {
    if (report.step % 10 != 0) return;
    std::printf("step %2lld  loss %.3f  idle %4.1f%%  peak", static_cast<long long>(report.step), report.loss,
                100 * report.mean_idle());
    for (const twobp::MemoryUse& use : report.stage_memory) std::printf("  %.2f MiB", use.peak / 1048576.0);
    std::printf("\n");
  }
};

}  // namespace

int main(int argc, char** argv) {
  twobp::Config config;
  auto& model = config.model.type.as<twobp::DecoderOptions>();
  model.dim = 64;
  model.layers = 2;
  config.data.text = argc > 1 ? argv[1] : __FILE__;
  config.data.sequence = 32;
  config.pipeline.stages = 2;
  config.pipeline.micro_batches = 4;
  config.pipeline.micro_batch_size = 2;
  config.optimizer.lr = 3e-3;
  config.train.steps = 50;
  twobp::check_config(config);

  twobp::Trainer trainer(config);
  trainer.add_observer(std::make_shared<Printer>());
  const double before = trainer.evaluate().value().loss;
  while (trainer.steps_done() < config.train.steps) trainer.step();
  const double after = trainer.evaluate().value().loss;
  std::printf("held-out loss %.3f -> %.3f\n", before, after);
  return after < before ? 0 : 1;
}
