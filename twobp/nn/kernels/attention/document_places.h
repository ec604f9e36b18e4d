// Where the documents of a batch lie, in the forms in which attention reads them.
#pragma once

#include <optional>

#include <ATen/ATen.h>

namespace twobp {

// The documents one after another, for kernels that compute each document by itself. Positions count through the
// samples: position i of sample b is b S + i.
struct DocumentRows {
  at::Tensor bounds;    // int32: document d has the positions [bounds[d], bounds[d + 1])
  int64_t longest = 0;  // the positions of the longest one
  // (B, S) bool: the positions that attend to themselves alone, although they lie in a document with others. Undefined:
  // none.
  at::Tensor alone;

  int64_t count() const { return bounds.size(0) - 1; }
};

// Belongs to one rank. Each form is made and copied to a device when it is asked for first. The host does not wait for
// the copies, which are in its current stream.
class DocumentPlaces {
 public:
  // starts (B, S) int64, on the host: see PackedAttention. The caller has checked its numbers.
  explicit DocumentPlaces(const at::Tensor& starts);

  const at::Tensor& starts() const { return starts_; }
  const at::Tensor& starts_on(at::Device device) const;
  // For samples that begin at position 0. Padding gives many documents of one position each, and a kernel needs some
  // time and memory for each document. So such neighbours are one document here, and `alone`.
  const DocumentRows& rows_on(at::Device device) const;

 private:
  at::Tensor starts_;
  mutable at::Tensor on_device_;
  mutable std::optional<DocumentRows> rows_;
};

}  // namespace twobp
