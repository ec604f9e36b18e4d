// Copies of tensors, to go back to.
#pragma once

#include <vector>

#include <ATen/ATen.h>

namespace twobp {

class Savepoint {
 public:
  // Allocates the copy, booked on the stage as optimizer state. `live` is changed in place later on.
  void add(const at::Tensor& live, int stage);
  void save();
  void roll_back() const;

 private:
  struct Entry {
    at::Tensor live, copy;
  };
  std::vector<Entry> entries_;
};

}  // namespace twobp
