#include "benchmarks/emulated.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/nn/expert_group.h"

namespace twobp {
namespace {

using Clock = std::chrono::steady_clock;

at::Tensor bytes(int64_t count) {
  return at::empty({std::max<int64_t>(count, 1)}, at::kByte);
}

class Waiting : public Layer {
 public:
  Waiting(const EmulatedLayer& cost, int64_t input_bytes, bool last, const std::string& name)
      : cost_(cost), input_bytes_(input_bytes), last_(last) {
    const int64_t count = cost.gradient_bytes / static_cast<int64_t>(sizeof(float));
    if (count > 0) {
      weight_.emplace(std::vector<ParameterPart>{{name + ".weight", count}}, std::vector<int64_t>{count}, at::kFloat,
                      /*std=*/0.0);
    }
  }

  Values forward(Values, Context& context, Saved& saved) override {
    exchange(context);
    const auto begin = Clock::now();
    if (context.keeps()) {
      const int64_t until_p2 = std::min(cost_.stash_bytes, cost_.activation_bytes);
      if (cost_.activation_bytes > until_p2) saved.keep_until_p1(bytes(cost_.activation_bytes - until_p2));
      if (until_p2 > 0) saved.keep_until_p2(bytes(until_p2));
    }
    Values y = {last_ ? at::zeros({}, at::TensorOptions().dtype(at::kDouble)) : bytes(cost_.boundary_bytes)};
    wait(begin, cost_.forward);
    exchange(context);
    return y;
  }

  Values backward_p1(Values, Context& context, Saved& saved) override {
    exchange(context);
    const auto begin = Clock::now();
    Values dx = {bytes(input_bytes_)};
    const int64_t more = cost_.stash_bytes - cost_.activation_bytes;
    if (more > 0) saved.keep_until_p2(bytes(more));
    if (!has_p2()) add_nothing();
    wait(begin, cost_.backward_p1);
    exchange(context);
    return dx;
  }

  void backward_p2(std::span<Saved* const> saved) override {
    const auto begin = Clock::now();
    add_nothing();
    wait(begin, cost_.backward_p2 * static_cast<double>(saved.size()));
  }

  void collect_p2(Saved& saved, std::vector<P2Unit>& units) override {
    if (has_p2()) units.push_back({this, &saved});
  }

  void collect_parameters(std::vector<Parameter*>& parameters) override {
    if (weight_) parameters.push_back(&*weight_);
  }

 private:
  bool has_p2() const { return cost_.backward_p2 > 0 || cost_.stash_bytes > 0; }
  // A gradient of 0: a weight without one would be an error.
  void add_nothing() {
    if (weight_) weight_->grad_to_add();
  }
  void exchange(const Context& context) const {
    if (cost_.exchange_bytes == 0 || context.experts == nullptr) return;
    context.experts->send(std::vector<Values>(static_cast<size_t>(cost_.replicas), {bytes(cost_.exchange_bytes)}));
    context.experts->receive();
  }
  static void wait(Clock::time_point begin, double seconds) {
    if (seconds <= 0) return;
    std::this_thread::sleep_until(begin +
                                  std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)));
  }

  EmulatedLayer cost_;
  int64_t input_bytes_;
  bool last_;
  std::optional<Parameter> weight_;
};

}  // namespace

ModelSpec emulated(const std::vector<EmulatedLayer>& layers) {
  TWOBP_CHECK(!layers.empty(), "an emulated model needs at least one layer");
  ModelSpec model;
  std::vector<EmulatedLayer> kinds;
  int64_t input_bytes = 0;
  for (size_t i = 0; i < layers.size(); ++i) {
    const EmulatedLayer& cost = layers[i];
    TWOBP_CHECK(cost.forward >= 0 && cost.backward_p1 >= 0 && cost.backward_p2 >= 0 && cost.activation_bytes >= 0 &&
                    cost.stash_bytes >= 0 && cost.boundary_bytes >= 0 && cost.gradient_bytes >= 0 &&
                    cost.exchange_bytes >= 0,
                "emulated layer ", i, " has a negative time or size");
    const bool last = i + 1 == layers.size();
    const auto known = std::find(kinds.begin(), kinds.end(), cost);
    const auto kind = known - kinds.begin();
    if (known == kinds.end()) kinds.push_back(cost);
    // The first and the last layer have different inputs and outputs.
    model.layers.push_back({concat("layers.", i), concat("wait ", kind, i == 0 ? " first" : "", last ? " last" : ""),
                            [cost, input_bytes, last, name = concat("layers.", i)] {
                              return std::make_unique<Waiting>(cost, input_bytes, last, name);
                            }});
    input_bytes = cost.boundary_bytes;
  }
  return model;
}

}  // namespace twobp
