// A part of another dataset, and a split that holds out the same fraction of every class.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "twobp/data/data.h"

namespace twobp {

class Subset : public Dataset {
 public:
  // Sample i is sample indices[i] of `whole`.
  Subset(std::shared_ptr<const Dataset> whole, std::vector<int64_t> indices);

  int64_t size() const override { return static_cast<int64_t>(indices_.size()); }
  Fields read(const std::vector<int64_t>& indices, int64_t epoch) const override;
  int64_t cost(int64_t sample) const override { return whole_->cost(indices_[static_cast<size_t>(sample)]); }

 private:
  std::shared_ptr<const Dataset> whole_;
  std::vector<int64_t> indices_;
};

// Holds out `fraction` of each class, chosen by `seed`: at least one sample in total, and never a class's last sample.
// The held-out samples are shuffled once, so that the first of them come from all classes. `labels` are the samples'
// classes. A fraction of 0 holds out nothing. Throws Error if no class has two samples.
DataSplit hold_out_by_class(std::shared_ptr<Dataset> whole, const std::vector<int64_t>& labels, double fraction,
                            uint64_t seed);

}  // namespace twobp
