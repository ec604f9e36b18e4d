// Compares F and I + W of each kind of layer with the same layer in ATen with autograd, on one thread and in one
// process:
//
//   build/release/benchmarks/layer_benchmark --benchmark_enable_random_interleaving=true
//   --benchmark_repetitions=15
//       --benchmark_report_aggregates_only=true
//
// The autograd side contains no Python. It measures only the autograd engine and the kernels.
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <benchmark/benchmark.h>

#include "twobp/core/measure.h"
#include "twobp/models/decoder/family.h"
#include "twobp/pipeline/memory/memory_meter.h"

namespace twobp {
namespace {

struct Size {
  int64_t dim, heads, hidden, vocab, sequence, micro_batch;
};
constexpr Size kLarge = {512, 8, 1408, 4096, 256, 2};
constexpr Size kSmall = {256, 8, 704, 4096, 128, 2};

enum Kind { kEmbedding, kAttention, kMlp, kHead };

Fields make_fields(const Size& size) {
  const auto ids = at::randint(size.vocab, {size.micro_batch, size.sequence}, at::TensorOptions().dtype(at::kLong));
  return {{"input_ids", ids}, {"labels", ids.roll(-1, 1)}};
}

at::Tensor make_input(const Size& size) {
  return at::randn({size.micro_batch, size.sequence, size.dim});
}

std::unique_ptr<Layer> make_layer(const Size& size, Kind kind, std::vector<Parameter*>& parameters) {
  DecoderOptions options;
  options.dim = size.dim;
  options.layers = 1;
  options.heads = options.kv_heads = size.heads;
  options.head_dim = size.dim / size.heads;
  options.hidden = size.hidden;
  options.vocab = size.vocab;
  auto layer = llama(options).layers[kind].make();
  layer->collect_parameters(parameters);
  for (Parameter* parameter : parameters) {
    parameter->allocate_value(1);
    parameter->allocate_grad();
  }
  return layer;
}

void split_backward(benchmark::State& state, Size size, Kind kind, bool backward) {
  at::set_num_threads(1);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::vector<Parameter*> parameters;
  const auto layer = make_layer(size, kind, parameters);
  const Fields fields = make_fields(size);
  Context context;
  context.fields = &fields;
  context.loss_weight = 1.0 / static_cast<double>(size.micro_batch * size.sequence);
  const at::Tensor input = make_input(size);
  Saved saved;
  MemoryMeter meter({0});
  layer->forward(kind == kEmbedding ? Values{} : Values{input}, context, saved);  // creates the rotary tables
  saved.release();
  {
    // The bytes that are live after F and after I, including the output and the input's gradient, and the bytes that W
    // frees.
    const MemoryMeter::Watch watch(meter);
    const MemoryMeter::Scope scope(0, MemoryCategory::kActivations);
    const auto held = [&](const char* name) { state.counters[name] = static_cast<double>(meter.held(0)) / (1 << 20); };
    Values y = layer->forward(kind == kEmbedding ? Values{} : Values{input.clone()}, context, saved);
    held("MiB_after_F");
    const Values dx = layer->backward_p1(kind == kHead ? Values{} : std::move(y), context, saved);
    held("MiB_after_I");
    saved.release();
    held("MiB_of_dx");
    for (Parameter* parameter : parameters) parameter->forget_grad();
  }
  for (auto _ : state) {
    const double f = now_seconds();
    Values y = layer->forward(kind == kEmbedding ? Values{} : Values{input}, context, saved);
    const double begin = now_seconds();
    if (backward) {
      Values dx = layer->backward_p1(kind == kHead ? Values{} : std::move(y), context, saved);
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

// The layer as eager PyTorch runs it.
struct Eager {
  Eager(const Size& size, Kind kind) : size(size), kind(kind), half(size.dim / size.heads / 2) {
    const auto weight = [&](int64_t rows, int64_t cols) {
      weights.push_back((at::randn({rows, cols}) * 0.02).set_requires_grad(true));
    };
    if (kind == kEmbedding) {
      weight(size.vocab, size.dim);
      return;
    }
    weights.push_back(at::ones({size.dim}).set_requires_grad(true));
    if (kind == kAttention) {
      for (int i = 0; i < 4; ++i) weight(size.dim, size.dim);
      const at::Tensor angle = at::outer(at::arange(size.sequence, at::kFloat), at::rand({half}));
      cos = angle.cos();
      sin = angle.sin();
    } else if (kind == kMlp) {
      weight(size.hidden, size.dim);
      weight(size.hidden, size.dim);
      weight(size.dim, size.hidden);
    } else {
      weight(size.vocab, size.dim);
    }
  }

  at::Tensor rope(const at::Tensor& x) const {
    const at::Tensor a = x.narrow(-1, 0, half);
    const at::Tensor b = x.narrow(-1, half, half);
    return at::cat({a * cos - b * sin, a * sin + b * cos}, -1);
  }

  at::Tensor forward(const at::Tensor& x, const Fields& fields) const {
    if (kind == kEmbedding) return at::embedding(weights[0], fields.at("input_ids"));
    const at::Tensor h = at::rms_norm(x, {size.dim}, weights[0], 1e-5);
    if (kind == kHead) {
      return at::cross_entropy_loss(at::linear(h, weights[1]).view({-1, size.vocab}), fields.at("labels").view({-1}));
    }
    if (kind == kMlp) {
      return x + at::linear(at::silu(at::linear(h, weights[1])) * at::linear(h, weights[2]), weights[3]);
    }
    const auto heads = [&](int i) {
      return at::linear(h, weights[i]).view({size.micro_batch, size.sequence, size.heads, 2 * half}).transpose(1, 2);
    };
    const at::Tensor a = at::scaled_dot_product_attention(rope(heads(1)), rope(heads(2)), heads(3), {}, 0.0, true);
    return x + at::linear(a.transpose(1, 2).reshape({size.micro_batch, size.sequence, size.dim}), weights[4]);
  }

  Size size;
  Kind kind;
  int64_t half;
  std::vector<at::Tensor> weights;
  at::Tensor cos, sin;
};

void autograd_backward(benchmark::State& state, Size size, Kind kind, bool backward) {
  at::set_num_threads(1);
  const Eager layer(size, kind);
  const Fields fields = make_fields(size);
  const at::Tensor input = make_input(size).set_requires_grad(true);
  const at::Tensor dy = make_input(size);
  for (auto _ : state) {
    const double f = now_seconds();
    const at::Tensor y = layer.forward(input, fields);
    const double begin = now_seconds();
    if (backward) y.backward(kind == kHead ? at::Tensor() : dy);
    state.SetIterationTime(backward ? now_seconds() - begin : begin - f);
    input.mutable_grad().reset();
    for (const auto& weight : layer.weights) weight.mutable_grad().reset();
  }
}

void register_all() {
  const std::pair<const char*, Size> sizes[] = {{"dim512", kLarge}, {"dim256", kSmall}};
  const std::pair<const char*, Kind> kinds[] = {
      {"embedding", kEmbedding}, {"attention", kAttention}, {"mlp", kMlp}, {"head", kHead}};
  for (const auto& [size_name, size] : sizes) {
    for (const auto& [kind_name, kind] : kinds) {
      for (const bool backward : {false, true}) {
        const std::string name = std::string(size_name) + "/" + kind_name + (backward ? "/backward" : "/forward");
        benchmark::RegisterBenchmark((name + "/twobp").c_str(), split_backward, size, kind, backward)
            ->UseManualTime()
            ->Unit(benchmark::kMillisecond);
        benchmark::RegisterBenchmark((name + "/autograd").c_str(), autograd_backward, size, kind, backward)
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
