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
#include <vector>

#include <ATen/ATen.h>

#include "twobp/nn/kernels/attention/document_places.h"
#include "twobp/nn/kernels/encoder/dropout.h"

namespace twobp {

// Keys and values of an earlier slice of the sequences (Context::slice), L positions long.
struct EarlierKeys {
  at::Tensor rows;  // (B, L, packed()), or (B, L, 2 K D) = (k | v) if not `packed`
  bool packed = true;
  at::Tensor gradient;  // (B, L, 2 K D) = (dL/dk | dL/dv), to which backward adds
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
  bool interleaved = false;  // a row is (q | k | v) of head 0, then of head 1, and so on; H = K

  // Used by causal attention over a slice: `packed` has the queries [P, P + S). The keys and values of the first P
  // positions are in `earlier`, in order, and are read without a copy. `shift` has P + S columns.
  std::vector<EarlierKeys> earlier{};
  at::Tensor from_later{};  // (B, S, 2 K D), a gradient of the slice's own k and v, which backward adds to theirs

  // A row: (q | k | v), (H + 2 K) heads.
  int64_t packed() const { return (heads + 2 * kv_heads) * head_dim; }
  // The first numbers of heads in a row.
  int64_t q_column(int64_t head) const { return (interleaved ? 3 * head : head) * head_dim; }
  int64_t k_column(int64_t kv) const { return (interleaved ? 3 * kv + 1 : heads + kv) * head_dim; }
  int64_t v_column(int64_t kv) const { return (interleaved ? 3 * kv + 2 : heads + kv_heads + kv) * head_dim; }
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

// packed (B, S, (H + 2 K) D), of attention_type() -> out (B, S, H D), log_sum_exp (B, H, S), in the wide dtype. All
// tensors are contiguous, except that the rows of packed and dpacked may be padded (padded_rows.h).
void packed_attention_forward(const at::Tensor& packed, const PackedAttention& attention, at::Tensor& out,
                              at::Tensor& log_sum_exp);

// dL/dpacked from dL/dout; `dpacked` may be `packed` itself.
void packed_attention_backward(const at::Tensor& packed, const PackedAttention& attention, const at::Tensor& out,
                               const at::Tensor& log_sum_exp, const at::Tensor& dout, at::Tensor& dpacked);

}  // namespace twobp
