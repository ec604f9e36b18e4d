// What the interpreter of captured programs adds to an operator: a chain of additions of small tensors, as a
// program and as direct calls of ATen. The difference over the number of operators is the overhead of one.
//
//   build/release/benchmarks/graph_benchmark --benchmark_enable_random_interleaving=true
//       --benchmark_repetitions=9 --benchmark_report_aggregates_only=true
#include <string>

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <benchmark/benchmark.h>

#include "twobp/graph/interpreter.h"
#include "twobp/graph/liveness.h"
#include "twobp/graph/read_code.h"

namespace twobp {
namespace {

constexpr int kOperators = 1000;

// Slot 0 is the input, and instruction i adds it to the result of the one before. `in_place`: results may
// take the memory of the ones before.
graph::Pass chain(bool in_place) {
  nlohmann::json code = nlohmann::json::array();
  for (int i = 0; i < kOperators; ++i) {
    const nlohmann::json args = {{{"v", i}}, {{"v", 0}}, 1};
    code.push_back({{"op", "aten::add.Tensor"}, {"args", args}, {"out", {i + 1}}});
  }
  const JsonNode node(code, "benchmark", "code");
  graph::Input input;
  graph::Pass pass = graph::make_pass({input}, graph::read_code(node, {kOperators + 1, false, false}), {kOperators});
  if (!in_place) {
    for (graph::Instruction& one : pass.code) one.over = -1;
  }
  return pass;
}

void interpreted(benchmark::State& state, bool in_place) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const graph::Pass pass = chain(in_place);
  const at::Tensor x = at::ones({8});
  for (auto _ : state) {
    graph::Frame frame(kOperators + 1);
    frame.put(0, x);
    graph::run(pass.code, frame, {});
    benchmark::DoNotOptimize(frame.tensor(kOperators));
  }
  state.SetItemsProcessed(state.iterations() * kOperators);
}

void direct(benchmark::State& state, bool in_place) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor x = at::ones({8});
  for (auto _ : state) {
    at::Tensor y = x;
    for (int i = 0; i < kOperators; ++i) {
      if (in_place && i > 0) {
        y.add_(x);
      } else {
        y = at::add(y, x);
      }
    }
    benchmark::DoNotOptimize(y);
  }
  state.SetItemsProcessed(state.iterations() * kOperators);
}

}  // namespace
}  // namespace twobp

int main(int argc, char** argv) {
  at::set_num_threads(1);
  for (const bool in_place : {false, true}) {
    const std::string kind = in_place ? "in_place" : "out_of_place";
    benchmark::RegisterBenchmark(("program/" + kind).c_str(), twobp::interpreted, in_place);
    benchmark::RegisterBenchmark(("direct/" + kind).c_str(), twobp::direct, in_place);
  }
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
