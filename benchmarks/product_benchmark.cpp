// Compares W's matrix products in twobp with a single ATen call on dense matrices, on one thread. In twobp, narrow
// products run in parts (nn/kernels/products/gemm), and wide ones read a dy with padded rows
// (nn/kernels/products/padded_rows).
//
//   build/release/benchmarks/product_benchmark --benchmark_enable_random_interleaving=true
//       --benchmark_repetitions=9 --benchmark_report_aggregates_only=true
//
// The operands are not in any cache. After each product, an untimed compute-bound product runs, because the layers of a
// stage also alternate. Sizes: dW (out, in) over rows.
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <benchmark/benchmark.h>

#include "twobp/core/measure.h"
#include "twobp/nn/kernels/products/products.h"
#include "twobp/nn/kernels/products/rows.h"

namespace twobp {
namespace {

struct Size {
  const char* name;
  int64_t out, in;
  bool padded = false;
};
// Mamba's narrow projections at dim 512, adapters of rank 8 and 16, and a wide product. Then LLaMa's products at dim
// 512 with padded outputs, including its head, and the q k v product of BERT base.
const Size kSizes[] = {{"dt_proj", 1024, 32},    {"x_proj", 64, 1024},      {"lora_a", 8, 2048},
                       {"lora_b", 2048, 16},     {"wide", 512, 512},        {"gate_up", 2816, 512, true},
                       {"qkv", 1536, 512, true}, {"head", 4096, 512, true}, {"bert", 2304, 768, true}};

void product(benchmark::State& state, const Size& size, int64_t rows, bool ours) {
  at::set_num_threads(1);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  struct Operands {
    at::Tensor dy, x;
  };
  std::vector<Operands> operands;
  for (int64_t bytes = 0; bytes < int64_t{128} << 20; bytes += 4 * rows * (size.out + size.in)) {
    at::Tensor dy = empty_rows({rows, size.out}, at::kFloat, ours && size.padded);
    operands.push_back({dy.normal_(), at::randn({rows, size.in})});
  }
  at::Tensor dw = at::zeros({size.out, size.in});
  const at::Tensor other = at::randn({512, 2048});
  const at::Tensor another = at::randn({512, 512});
  at::Tensor other_dw = at::zeros({2048, 512});
  size_t next = 0;
  for (auto _ : state) {
    other_dw.addmm_(other.t(), another);
    const Operands& of = operands[next++ % operands.size()];
    const double begin = now_seconds();
    if (ours) {
      multiply_add(dw, of.dy.t(), of.x);
    } else {
      dw.addmm_(of.dy.t(), of.x);
    }
    state.SetIterationTime(now_seconds() - begin);
  }
  state.counters["GFLOPs"] = benchmark::Counter(2e-9 * static_cast<double>(rows * size.out * size.in),
                                                benchmark::Counter::kIsIterationInvariantRate);
}

const int kRegistered = [] {
  for (const Size& size : kSizes) {
    for (const int64_t rows : {512, 2048}) {
      for (const bool ours : {false, true}) {
        const std::string name = std::string(size.name) + '/' + std::to_string(rows) + (ours ? "/twobp" : "/ATen");
        benchmark::RegisterBenchmark(name.c_str(), product, size, rows, ours)->UseManualTime()->Iterations(50);
      }
    }
  }
  return 0;
}();

}  // namespace
}  // namespace twobp

BENCHMARK_MAIN();
