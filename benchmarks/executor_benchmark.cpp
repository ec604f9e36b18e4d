// Measures the overhead of the executor: seconds per instruction of a pipeline whose layers do nothing. Waiting is
// excluded.
//
//   build/release/benchmarks/executor_benchmark
#include <benchmark/benchmark.h>

#include "twobp/pipeline/pipeline.h"

namespace twobp {
namespace {

// Passes its input on. Its W does nothing, but it exercises the queue of pending W.
class NoOp : public Layer {
 public:
  Values forward(Values x, Context&, Saved& saved) override {
    saved.keep_until_p2(x[0]);
    return x;
  }
  Values backward_p1(Values dy, Context&, Saved& saved) override {
    return dy.empty() ? Values{saved.p2(0)} : std::move(dy);
  }
  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override { units.push_back({this, &saved}); }
};

// The last layer: its output is the loss.
class NoLoss : public NoOp {
 public:
  Values forward(Values x, Context& context, Saved& saved) override {
    NoOp::forward(std::move(x), context, saved);
    return {zero_};
  }

 private:
  at::Tensor zero_ = at::zeros({}, at::TensorOptions().dtype(at::kDouble));
};

void per_instruction(benchmark::State& state) {
  const auto stages = static_cast<int>(state.range(0));
  constexpr int kMicroBatches = 512;
  ModelSpec model;
  model.input_field = "input";
  Profile profile;
  for (int s = 0; s < stages; ++s) {
    const bool last = s + 1 == stages;
    model.layers.push_back({"layer", last ? "loss" : "no-op", [last]() -> std::unique_ptr<Layer> {
                              if (last) return std::make_unique<NoLoss>();
                              return std::make_unique<NoOp>();
                            }});
    profile[model.layers.back().kind] = {};
  }
  PipelineOptions options;
  options.stages = stages;
  options.split.assign(stages, 1);
  Pipeline pipeline(model, profile, options);
  const StepPlan plan = pipeline.plan("1f1b", kMicroBatches, P2Policy::kFill, {P2Batching::kLoop, 0});
  const std::vector<Fields> batch(kMicroBatches, Fields{{"input", at::zeros({1})}});
  double seconds = 0;
  double instructions = 0;
  StepRequest step;
  for (auto _ : state) {
    const StepReport report = pipeline.run(plan, batch, step);
    ++step.step;
    double own = 0;
    double count = 0;
    for (const RankTimes& rank : report.ranks) {
      own += rank.end - rank.begin;
      // The start-up wait counts from the start of the step. The part before the rank's own start is not in end -
      // begin.
      for (const double idle : rank.idle) own -= idle;
      own += (rank.begin - report.begin) + (report.end - rank.end);
      count += static_cast<double>(rank.instructions);
    }
    state.SetIterationTime(own / count);
    seconds += own;
    instructions += count;
  }
  state.counters["ns_per_instruction"] = seconds / instructions * 1e9;
}

BENCHMARK(per_instruction)->Arg(1)->Arg(2)->UseManualTime()->Iterations(200)->Unit(benchmark::kNanosecond);

}  // namespace
}  // namespace twobp

BENCHMARK_MAIN();
