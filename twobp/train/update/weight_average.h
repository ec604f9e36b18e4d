// A running mean of the weights of one rank. Evaluation and saving use it in place of the weights (optimizer.average).
// After the first step it is a copy of the weights, and after each later one
//   mean <- decay * mean + (1 - decay) * weights
// as in torch.optim.swa_utils.AveragedModel.
#pragma once

#include <cstdint>
#include <vector>

#include "twobp/train/update/optimizer.h"
#include "twobp/train/update/savepoint.h"

namespace twobp {

class WeightAverage {
 public:
  // Allocates the means on the calling thread.
  WeightAverage(double decay, const std::vector<Optimizer::Item>& items);

  // Adds the weights after the step of that number, counted from 1.
  void add(int64_t step);
  // Exchanges the weights and their means.
  void swap();
  void add_to(Savepoint& savepoint) const;
  // The means, for checkpoints.
  std::vector<Optimizer::State> state() const;

 private:
  double decay_;
  std::vector<Optimizer::Item> items_;
  std::vector<at::Tensor> means_;
};

}  // namespace twobp
