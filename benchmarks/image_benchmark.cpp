// Compares F and I + W of a ResNet's blocks with the same blocks in ATen with autograd, on one thread and in one
// process:
//
//   build/release/benchmarks/image_benchmark --benchmark_enable_random_interleaving=true
//   --benchmark_repetitions=9
//       --benchmark_report_aggregates_only=true
//
// The autograd side is PyTorch's default: channels in the second dimension. It contains no Python. On both sides,
// gradients are added to existing ones, as with several micro-batches.
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <benchmark/benchmark.h>

#include "twobp/core/measure.h"
#include "twobp/nn/layers/residual_block.h"
#include "twobp/pipeline/memory/memory_meter.h"

namespace twobp {
namespace {

constexpr int64_t kBatch = 8;

struct Size {
  const char* name;
  int64_t pixels;  // height and width of x
  ResidualBlockOptions block;
};
// Shapes of ResNet-50 and ResNet-18 with images of 64 and 224 pixels.
const Size kSizes[] = {
    {"64px/stage0", 16, {256, 256, 1, true}},      {"64px/stage1", 8, {512, 512, 1, true}},
    {"64px/stage2", 4, {1024, 1024, 1, true}},     {"64px/stage3", 2, {2048, 2048, 1, true}},
    {"64px/stage2first", 8, {512, 1024, 2, true}}, {"64px/basic1", 8, {128, 128, 1, false}},
    {"224px/stage0", 56, {256, 256, 1, true}},     {"224px/stage2", 14, {1024, 1024, 1, true}},
};

void split_backward(benchmark::State& state, const Size& size, bool backward) {
  at::set_num_threads(1);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  ResidualBlock layer("block", size.block, at::kFloat);
  std::vector<Parameter*> parameters;
  layer.collect_parameters(parameters);
  for (Parameter* parameter : parameters) {
    parameter->allocate_value(1);
    parameter->allocate_grad();
  }
  const at::Tensor input = at::randn({kBatch, size.pixels, size.pixels, size.block.in});
  Context context;
  Saved saved;
  MemoryMeter meter({0});
  at::Tensor dy;
  {
    const MemoryMeter::Watch watch(meter);
    const MemoryMeter::Scope scope(0, MemoryCategory::kActivations);
    const auto held = [&](const char* name) { state.counters[name] = static_cast<double>(meter.held(0)) / (1 << 20); };
    Values y = layer.forward({input.clone()}, context, saved);
    held("MiB_after_F");
    dy = at::randn(y[0].sizes());
    const Values dx = layer.backward_p1(std::move(y), context, saved);
    saved.release_p1();
    held("MiB_after_I");
    saved.release();
  }
  for (auto _ : state) {
    const double f = now_seconds();
    Values y = layer.forward({input}, context, saved);
    const double begin = now_seconds();
    if (backward) {
      Values dx = layer.backward_p1({dy}, context, saved);
      std::vector<P2Unit> units;
      layer.collect_p2(saved, units);
      for (const P2Unit& unit : units) unit.layer->backward_p2({&unit.saved, 1});
      benchmark::DoNotOptimize(dx);
    }
    state.SetIterationTime(backward ? now_seconds() - begin : begin - f);
    saved.release();
  }
}

struct Eager {
  explicit Eager(const ResidualBlockOptions& o) : options(o) {
    const int64_t narrow = o.bottleneck ? o.out / 4 : o.out;
    if (o.bottleneck) {
      add(o.in, narrow, 1);
      add(narrow, narrow, 3);
      add(narrow, o.out, 1);
    } else {
      add(o.in, narrow, 3);
      add(narrow, o.out, 3);
    }
    if (o.projects()) add(o.in, o.out, 1);
  }

  void add(int64_t in, int64_t out, int64_t kernel) {
    weights.push_back((at::randn({out, in, kernel, kernel}) * 0.05).set_requires_grad(true));
    gains.push_back(at::ones({out}).set_requires_grad(true));
    biases.push_back(at::zeros({out}).set_requires_grad(true));
    means.push_back(at::zeros({out}));
    vars.push_back(at::ones({out}));
  }

  at::Tensor conv_norm(const at::Tensor& x, size_t i, int64_t stride) const {
    const int64_t padding = weights[i].size(2) / 2;
    return at::batch_norm(at::conv2d(x, weights[i], {}, {stride, stride}, {padding, padding}), gains[i], biases[i],
                          means[i], vars[i], true, 0.1, 1e-5, false);
  }

  at::Tensor forward(const at::Tensor& x) const {
    const size_t count = options.bottleneck ? 3 : 2;
    at::Tensor y = x;
    for (size_t i = 0; i < count; ++i) {
      y = conv_norm(y, i, i == count - 2 ? options.stride : 1);
      if (i + 1 < count) y = at::relu(y);
    }
    y.add_(options.projects() ? conv_norm(x, count, options.stride) : x);
    return at::relu(y);
  }

  ResidualBlockOptions options;
  std::vector<at::Tensor> weights, gains, biases, means, vars;
};

void autograd_backward(benchmark::State& state, const Size& size, bool backward) {
  at::set_num_threads(1);
  const Eager layer(size.block);
  const at::Tensor input = at::randn({kBatch, size.block.in, size.pixels, size.pixels}).set_requires_grad(true);
  const at::Tensor dy = at::randn(layer.forward(input).sizes());
  for (auto _ : state) {
    const double f = now_seconds();
    const at::Tensor y = layer.forward(input);
    const double begin = now_seconds();
    if (backward) y.backward(dy);
    state.SetIterationTime(backward ? now_seconds() - begin : begin - f);
    input.mutable_grad().reset();
  }
}

void register_all() {
  for (const Size& size : kSizes) {
    for (const bool backward : {false, true}) {
      const std::string name = std::string(size.name) + (backward ? "/backward" : "/forward");
      const auto add = [&](const std::string& side, auto* run) {
        benchmark::RegisterBenchmark((name + side).c_str(), run, size, backward)
            ->UseManualTime()
            ->Unit(benchmark::kMillisecond);
      };
      add("/twobp", split_backward);
      add("/autograd", autograd_backward);
    }
  }
}

}  // namespace
}  // namespace twobp

int main(int argc, char** argv) {
  twobp::register_all();
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
