// Copies of tensors, to go back to.
#pragma once

#include <vector>

#include <ATen/ATen.h>

namespace twobp {

class Savepoint {
 public:
  // `live` is changed in place later on; its copy is booked on the stage as optimizer state.
  void add(const at::Tensor& live, int stage);
  // Allocates the copies the first time.
  void save();
  void roll_back() const;

 private:
  struct Entry {
    at::Tensor live, copy;
    int stage = 0;
  };
  std::vector<Entry> entries_;
};

}  // namespace twobp
