// Zero-copy concatenation for backward-p2. A Slab is a ring of micro-batch slots in one allocation; what p2
// will read is written straight into the micro-batch's slot (Context::destination), so that the rows of
// consecutive micro-batches already lie below each other and one GEMM reads them all.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <ATen/ATen.h>

namespace twobp {

class Slab {
 public:
  // `slots`: the most micro-batches that hold a slot at once.
  // `padded`: rows are padded (padded_rows.h).
  explicit Slab(int slots, bool padded = false) : slots_(slots), padded_(padded) {}

  // The slot of a micro-batch as a (rows, cols) view; allocates the ring at the first call, when the largest
  // micro-batch is seen. Undefined tensor if it does not fit (a larger micro-batch than the first).
  at::Tensor slot(int64_t micro_batch, int64_t rows, int64_t cols, const at::TensorOptions& options);

  // `tensor` in its slot: itself if it was written there, else a copy (counted).
  at::Tensor place(const at::Tensor& tensor, int64_t micro_batch);

  int64_t copies() const { return copies_; }

 private:
  int slots_;
  bool padded_;
  at::Tensor ring_;  // (slots * rows of a slot, cols)
  int64_t slot_rows_ = 0;
  int64_t copies_ = 0;
};

// Row-wise concatenation of (rows_i, cols) tensors as few matrices as possible: neighbours in memory become
// one view. With `copy`, one freshly allocated matrix, its rows padded.
std::vector<at::Tensor> concatenate_rows(std::span<const at::Tensor> parts, bool copy);

}  // namespace twobp
