// Measures forward and backward-p1 of three things on one thread: the selective scan (p1 is its whole backward, because
// nothing waits for W), the convolution before it, and the mixer with its W. benchmarks/rivals/scan.py compares it with
// the same scan in PyTorch:
//
//   build/release/benchmarks/scan_benchmark --benchmark_enable_random_interleaving=true
//   --benchmark_repetitions=15 --benchmark_report_aggregates_only=true
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <benchmark/benchmark.h>

#include "twobp/core/measure.h"
#include "twobp/nn/layers/mamba_mixer.h"

namespace twobp {
namespace {

struct Size {
  int64_t batch, sequence, dim;
  MambaMixerShape shape() const { return {dim, 2 * dim, 16, 4, dim / 16}; }
};
constexpr Size kLarge = {2, 256, 512};
constexpr Size kSmall = {2, 128, 256};

enum Part { kScan, kConv, kMixer };

std::unique_ptr<Layer> make_layer(const Size& size, Part part, std::vector<Parameter*>& parameters) {
  const MambaMixerShape shape = size.shape();
  std::unique_ptr<Layer> layer;
  if (part == kScan) layer = std::make_unique<SelectiveScan>("m", shape.inner, shape.state, at::kFloat);
  if (part == kConv) {
    layer = std::make_unique<CausalConv1d>("m.conv1d", shape.inner, shape.conv_kernel, at::kFloat);
  }
  if (part == kMixer) layer = std::make_unique<MambaMixer>("m", shape, 0.02, at::kFloat);
  layer->collect_parameters(parameters);
  for (Parameter* parameter : parameters) {
    parameter->allocate_value(1);
    parameter->allocate_grad();
  }
  return layer;
}

Values make_input(const Size& size, Part part) {
  const MambaMixerShape shape = size.shape();
  const auto numbers = [&](int64_t cols) { return at::randn({size.batch, size.sequence, cols}); };
  if (part == kMixer) return {numbers(shape.dim)};
  const at::Tensor uz = numbers(2 * shape.inner);  // halves of one matrix, as in the mixer
  const at::Tensor u = uz.narrow(2, 0, shape.inner);
  if (part == kConv) return {u};
  return {numbers(shape.inner), numbers(shape.inner), numbers(2 * shape.state), uz.narrow(2, shape.inner, shape.inner)};
}

void run(benchmark::State& state, Size size, Part part, bool backward) {
  at::set_num_threads(1);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::vector<Parameter*> parameters;
  const auto layer = make_layer(size, part, parameters);
  const Values input = make_input(size, part);
  Context context;
  Saved saved;
  for (auto _ : state) {
    const double f = now_seconds();
    Values y = layer->forward(input, context, saved);
    const double begin = now_seconds();
    if (backward) {
      Values dx = layer->backward_p1(std::move(y), context, saved);
      std::vector<P2Unit> units;
      layer->collect_p2(saved, units);
      for (const P2Unit& unit : units) unit.layer->backward_p2({&unit.saved, 1});
      benchmark::DoNotOptimize(dx);
    }
    state.SetIterationTime(backward ? now_seconds() - begin : begin - f);
    saved.release();
    for (Parameter* parameter : parameters) parameter->forget_grad();
  }
}

void register_all() {
  const std::pair<const char*, Size> sizes[] = {{"dim512", kLarge}, {"dim256", kSmall}};
  const std::pair<const char*, Part> parts[] = {{"scan", kScan}, {"conv1d", kConv}, {"mixer", kMixer}};
  for (const auto& [size_name, size] : sizes) {
    for (const auto& [part_name, part] : parts) {
      for (const bool backward : {false, true}) {
        const std::string name = std::string(size_name) + "/" + part_name + (backward ? "/backward" : "/forward");
        benchmark::RegisterBenchmark(name.c_str(), run, size, part, backward)
            ->UseManualTime()
            ->Unit(benchmark::kMillisecond);
      }
    }
  }
}

}  // namespace
}  // namespace twobp

int main(int argc, char** argv) {
  twobp::register_all();
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
