// Copies of tensors for rolling back.
#pragma once

#include <vector>

#include <ATen/ATen.h>

namespace twobp {

class Savepoint {
 public:
  // Allocates the copy, booked to the stage as optimizer state. `live` changes in place later.
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
