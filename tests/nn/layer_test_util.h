// Helpers that tests of layers share: random tensors, comparison within a number of roundings, one micro-batch that
// passes through a layer, and a count of live bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>

#include "tests/expect_error.h"
#include "twobp/nn/layer.h"

namespace twobp::test {

// Normal numbers that depend only on sizes and seed. The float32 numbers are the rounded float64 numbers.
inline at::Tensor random(at::IntArrayRef sizes, uint64_t seed, at::ScalarType dtype = at::kDouble) {
  return at::randn(sizes, at::detail::createCPUGenerator(seed), at::TensorOptions().dtype(at::kDouble)).to(dtype);
}

inline at::Tensor random_ids(at::IntArrayRef sizes, int64_t below, uint64_t seed) {
  return at::randint(below, sizes, at::detail::createCPUGenerator(seed), at::TensorOptions().dtype(at::kLong));
}

// About a third of each sample is padding, at its ends and within it. A sample may begin with padding.
inline at::Tensor random_mask(int64_t samples, int64_t positions, uint64_t seed) {
  return random_ids({samples, positions}, 3, seed).ne(0).to(at::kLong);
}

inline double largest(const at::Tensor& t) {
  return t.numel() == 0 ? 0 : t.abs().max().item().toDouble();
}

// Half the distance from 1 to the next number: the largest relative error of one rounding.
inline double unit_roundoff(at::ScalarType dtype) {
  return dtype == at::kFloat ? std::numeric_limits<float>::epsilon() / 2 : std::numeric_limits<double>::epsilon() / 2;
}

// Checks |actual - expected| <= bound, elementwise. NaN fails.
inline void expect_within(const at::Tensor& actual, const at::Tensor& expected, double bound, const std::string& what) {
  ASSERT_TRUE(actual.defined() && expected.defined()) << what;
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  EXPECT_LE(largest(actual.to(at::kDouble) - expected.to(at::kDouble)), bound) << what;
}

// For a result of `roundings` sequential operations in `dtype` whose partial results are no larger than the largest
// final one. Each operation adds an error of at most the unit roundoff times that number.
inline void expect_close(const at::Tensor& actual, const at::Tensor& expected, double roundings, at::ScalarType dtype,
                         const std::string& what) {
  expect_within(actual, expected, roundings * unit_roundoff(dtype) * largest(expected), what);
}

inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() == b.defined() && (!a.defined() || (a.scalar_type() == b.scalar_type() && at::equal(a, b)));
}

// Gives the layer's parameters values and gradient buffers, and returns them without buffers, such as running
// statistics. Gains differ from 1, because 1 would hide a missing factor.
inline std::vector<Parameter*> make_parameters(Layer& layer, uint64_t seed = 1) {
  std::vector<Parameter*> parameters;
  layer.collect_parameters(parameters);
  for (Parameter* parameter : parameters) {
    parameter->allocate_value(seed);
    parameter->allocate_grad();
    at::Tensor& value = parameter->value;
    if (parameter->is_buffer()) continue;
    if (value.dim() == 1) value.add_(random(value.sizes(), seed + 77, value.scalar_type()), 0.3);
  }
  std::erase_if(parameters, [](const Parameter* parameter) { return parameter->is_buffer(); });
  return parameters;
}

inline void forget_grads(const std::vector<Parameter*>& parameters) {
  for (Parameter* parameter : parameters) parameter->forget_grad();
}

// Copies of the gradients. A parameter without a gradient in this step has an undefined tensor.
inline std::vector<at::Tensor> copy_grads(const std::vector<Parameter*>& parameters) {
  std::vector<at::Tensor> grads;
  for (const Parameter* p : parameters) grads.push_back(p->has_grad() ? p->grad.clone() : at::Tensor());
  return grads;
}

inline Values values_of(at::Tensor tensor) {
  Values values;
  if (tensor.defined()) values.push_back(std::move(tensor));
  return values;
}

// Returns the only value, or an undefined tensor if there is none. The loss of an evaluation may be followed by the
// number of correct predictions.
inline at::Tensor only(Values values) {
  EXPECT_TRUE(values.size() <= 1 || (values.size() == 2 && values[1].scalar_type() == at::kLong));
  return values.empty() ? at::Tensor() : std::move(values[0]);
}

// One micro-batch that passes through a layer, in the order that the test chooses. Tensors are passed by value, so the
// layer may overwrite those that the test moves in.
class MicroBatch {
 public:
  explicit MicroBatch(Layer& layer, Fields fields = {}, int64_t index = 0, double loss_weight = 1)
      : layer_(layer), fields_(std::move(fields)), index_(index), loss_weight_(loss_weight) {}
  MicroBatch(const MicroBatch&) = delete;
  MicroBatch& operator=(const MicroBatch&) = delete;

  Context context(bool training = true) const {
    Context context;
    context.fields = &fields_;
    context.micro_batch = index_;
    context.loss_weight = loss_weight_;
    context.training = training;
    return context;
  }

  at::Tensor forward(at::Tensor x) {
    Context c = context();
    return only(layer_.forward(values_of(std::move(x)), c, saved));
  }
  // Uses the same Saved, which evaluation must not write.
  at::Tensor evaluate(at::Tensor x) {
    Context c = context(false);
    return only(layer_.forward(values_of(std::move(x)), c, saved));
  }
  at::Tensor p1(at::Tensor dy) {
    Context c = context();
    return only(layer_.backward_p1(values_of(std::move(dy)), c, saved));
  }
  // Runs the leaves one by one and releases each when it is done, as the executor does.
  void p2() {
    for (const P2Unit& unit : p2_units()) {
      unit.layer->backward_p2({&unit.saved, 1});
      unit.saved->release_p2();
    }
  }
  std::vector<P2Unit> p2_units() {
    std::vector<P2Unit> units;
    layer_.collect_p2(saved, units);
    return units;
  }

  Saved saved;

 private:
  Layer& layer_;
  Fields fields_;
  int64_t index_;
  double loss_weight_;
};

// Backward-p2 of several micro-batches, with one call per leaf layer.
inline void p2_together(const std::vector<MicroBatch*>& micro_batches) {
  std::vector<std::vector<P2Unit>> units;
  for (MicroBatch* micro_batch : micro_batches) units.push_back(micro_batch->p2_units());
  for (size_t leaf = 0; leaf < units[0].size(); ++leaf) {
    std::vector<Saved*> saved;
    for (const auto& of_one : units) saved.push_back(of_one[leaf].saved);
    units[0][leaf].layer->backward_p2(saved);
    for (Saved* one : saved) one->release_p2();
  }
}

// Counts the bytes that this thread allocates and frees through LibTorch during its lifetime.
class LiveBytes {
 public:
  LiveBytes() : count_(std::make_shared<Count>()), guard_(c10::DebugInfoKind::PROFILER_STATE, count_) {}

  int64_t now() const { return count_->now; }
  int64_t peak() const { return count_->peak; }
  void restart_peak() { count_->peak = count_->now; }

 private:
  struct Count : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void*, int64_t alloc_size, size_t, size_t, c10::Device) override {
      now += alloc_size;
      peak = std::max(peak, now);
    }
    bool memoryProfilingEnabled() const override { return true; }
    int64_t now = 0;
    int64_t peak = 0;
  };
  std::shared_ptr<Count> count_;
  c10::DebugInfoGuard guard_;
};

}  // namespace twobp::test
