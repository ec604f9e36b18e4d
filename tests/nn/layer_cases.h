// The list of all layers for the tests that cover every layer. Each has small odd sizes, sizes of several blocks, and a
// reference on autograd.
#pragma once

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/nn/layer_test_util.h"

namespace twobp::test {

struct LayerCase {
  std::string name;
  std::function<std::unique_ptr<Layer>(at::ScalarType)> make;
  // The sizes of x for a micro-batch with this many samples. Empty for a layer without input.
  std::function<std::vector<int64_t>(int64_t samples)> input;
  std::function<Fields(int64_t samples, uint64_t seed, at::ScalarType)> fields;
  // Computes y from x and the parameters in the layer's order, in float64.
  std::function<at::Tensor(const at::Tensor& x, const std::vector<at::Tensor>& w, const Fields&)> reference;
  // The number of sequential operations from the input to any result: the longest sum, and the operations before and
  // after it. See expect_close.
  double roundings = 0;
  double loss_weight = 0;  // not 0: a loss, without dL/dy
  // Normalizes by the micro-batch in training, and by running statistics in an evaluation. Gradients of numbers of 16
  // bits are differences of rounded numbers.
  bool batch_statistics = false;
  // A CPU goes around an error of LibTorch, which a device does not have, so its bits differ.
  bool other_way_on_cpu = false;

  bool is_loss() const { return loss_weight != 0; }

  at::Tensor make_input(int64_t samples, uint64_t seed, at::ScalarType dtype) const;
  // Undefined for a loss.
  at::Tensor make_gradient(const at::Tensor& y, uint64_t seed) const;
  std::unique_ptr<MicroBatch> micro_batch(Layer& layer, int64_t samples, uint64_t seed, at::ScalarType dtype,
                                          int64_t index = 0) const;
};

const std::vector<LayerCase>& layer_cases();

inline std::ostream& operator<<(std::ostream& out, const LayerCase& c) {
  return out << c.name;
}

// TEST_P(EveryLayer, ...) in any file runs for all cases.
class EveryLayer : public testing::TestWithParam<LayerCase> {};

}  // namespace twobp::test
