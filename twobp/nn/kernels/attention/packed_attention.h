// Softmax attention of packed rows, forward and backward (the recomputing backward of FlashAttention, arXiv 2205.14135,
// algorithm 4): causal or bidirectional, with padding and dropout. Queries are processed in blocks. A causal block
// multiplies only with the keys from the first that one of its queries sees up to its own last position. At 256
// positions and without a window this takes 5/8 of the products of full tiles. The backward pass recomputes the
// probabilities and the dropout masks. So nothing of size S x S is kept, and no temporary is larger than a block.
// Grouped queries read their key-value head in place, without copies.
//
// One task handles a batch entry and key-value head, block by block. With two or more tasks, the result does not depend
// on the number of threads. (A single task leaves the threads to the products inside it.)
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <ATen/ATen.h>

#include "twobp/nn/kernels/rows/dropout.h"

namespace twobp {

// Where the documents of a batch lie, in the forms in which attention reads them.

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

// Keys and values of an earlier slice of the sequences (Context::slice), L positions long.
struct EarlierKeys {
  at::Tensor rows;  // (B, L, packed()), or (B, L, K (D + V)) = (k | v) if not `packed`
  bool packed = true;
  at::Tensor gradient;  // (B, L, K (D + V)) = (dL/dk | dL/dv), to which backward adds
};

struct PackedAttention {
  int64_t heads = 1;     // H
  int64_t kv_heads = 1;  // K, divides H
  int64_t head_dim = 1;  // D
  bool causal = false;   // a query attends only to the keys up to its own position
  at::Tensor shift;      // (B, S), added to the scores of each sample's keys; undefined: none
  DropoutMask dropout;   // of the probabilities; row (b H + h) S + s of the mask is query s of head h, and column 0 the
                         // first key that it sees. Kernels of a GPU draw another mask from its key (fused_attention.h)

  // Used by causal attention: query i sees keys [max(starts_i, i - window + 1), i].
  int64_t window = 0;  // 0: no window
  // starts (B, S), not falling along S, at most i; null: 0.
  std::shared_ptr<const DocumentPlaces> documents{};

  double scale = 0;          // of the scores; 0: 1 / sqrt(D)
  double cap = 0;            // scaled scores become cap * tanh(score / cap); 0: they do not
  bool interleaved = false;  // a row is (q | k | v) of head 0, then of head 1, and so on; H = K, V = D
  int64_t value_dim = 0;     // V, of a head's values; 0: D

  // Used by causal attention over a slice: `packed` has the queries [P, P + S). The keys and values of the first P
  // positions are in `earlier`, in order, and are read without a copy. `shift` has P + S columns.
  std::vector<EarlierKeys> earlier{};
  at::Tensor from_later{};  // (B, S, K (D + V)), a gradient of the slice's own k and v, which backward adds to theirs

  int64_t value_width() const { return value_dim > 0 ? value_dim : head_dim; }
  // A row: (q | k | v), H D + K (D + V).
  int64_t packed() const { return heads * head_dim + kv_width(); }
  int64_t kv_width() const { return kv_heads * (head_dim + value_width()); }
  int64_t out_width() const { return heads * value_width(); }
  // The first numbers of heads in a row.
  int64_t q_column(int64_t head) const { return (interleaved ? 3 * head : head) * head_dim; }
  int64_t k_column(int64_t kv) const { return (interleaved ? 3 * kv + 1 : heads + kv) * head_dim; }
  int64_t v_column(int64_t kv) const {
    return interleaved ? (3 * kv + 2) * head_dim : (heads + kv_heads) * head_dim + kv * value_width();
  }
  // P
  int64_t past() const {
    int64_t sum = 0;
    for (const EarlierKeys& keys : earlier) sum += keys.rows.size(1);
    return sum;
  }
};

// The dtype in which packed_attention_forward takes these rows: their own on a GPU with a kernel for them
// (fused_attention.h), and otherwise the wide one, float32 or float64.
at::ScalarType attention_type(const at::Tensor& packed, const PackedAttention& attention);

// packed (B, S, packed()), of attention_type() -> out (B, S, H V), log_sum_exp (B, H, S), in the wide dtype. All
// tensors are contiguous, except that the rows of packed and dpacked may be padded (padded_rows.h).
void packed_attention_forward(const at::Tensor& packed, const PackedAttention& attention, at::Tensor& out,
                              at::Tensor& log_sum_exp);

// dL/dpacked from dL/dout; `dpacked` may be `packed` itself.
void packed_attention_backward(const at::Tensor& packed, const PackedAttention& attention, const at::Tensor& out,
                               const at::Tensor& log_sum_exp, const at::Tensor& dout, at::Tensor& dpacked);

// The heads of packed rows as tensors, for attention by LibTorch's operators and kernels.

// q (B, S, H, D), k (B, P + S, K, D) and v (B, P + S, K, V): views of the rows, or copies behind those of earlier
// slices, so that one product reads them all.
struct PackedHeads {
  PackedHeads(const at::Tensor& packed, const PackedAttention& attention);
  at::Tensor q, k, v;
};

// Passes on the gradients of these, in their sizes: adds those of earlier keys to theirs,
// and writes the others, with what came from later slices, to `dpacked`.
void give_gradients(const PackedAttention& attention, const at::Tensor& dq, at::Tensor dk, at::Tensor dv,
                    at::Tensor& dpacked);

// Attention of packed rows on a GPU by ATen's fused CUDA kernels (fused_heads.h).

// Whether a kernel computes this: float32, bfloat16 or float16 on a GPU, heads of up to 256 and a multiple of 8
// numbers, also of values, without a cap. Dropout in slices has the mask of the whole sequence, which kernels do not
// draw. Documents take 16 bits, and neither padding nor earlier slices.
bool takes_fused_attention(const at::Tensor& packed, const PackedAttention& attention);

// As packed_attention_forward and packed_attention_backward, for what takes_fused_attention(). `from_later`, the
// gradients of earlier keys and log_sum_exp are float32.
void fused_attention_forward(const at::Tensor& packed, const PackedAttention& attention, at::Tensor& out,
                             at::Tensor& log_sum_exp);
void fused_attention_backward(const at::Tensor& packed, const PackedAttention& attention, const at::Tensor& out,
                              const at::Tensor& log_sum_exp, const at::Tensor& dout, at::Tensor& dpacked);

}  // namespace twobp
