// A weight and its gradient. A weight that is used in several places (tied embeddings) is one Parameter per use. They
// have the same name, and what each adds to the gradient is kept apart until all has come, so that the uses are summed
// in a fixed order.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "twobp/nn/expert_group.h"

namespace twobp {

// The projections that one named weight consists of, such as GPT-2's c_attn of q, k and v. In each of `groups` of its
// outputs, such as heads, those of the projections follow each other.
struct Projections {
  std::vector<int64_t> outputs{};  // of each projection in all groups; empty: the weight is one projection
  int64_t groups = 1;
  bool columns = false;  // whether the outputs are the columns; else the rows
};

// Several weights may be stored as one matrix that stacks their rows (the projections to q, k and v).
struct ParameterPart {
  std::string name;  // as in Hugging Face's LLaMa: "model.layers.0.self_attn.q_proj.weight"
  int64_t rows = 0;
  Projections projections{};
};

// A view (rows, the rest) of the same memory. The tensor is contiguous, or has four dimensions in channels-last order;
// the rest is in memory order.
at::Tensor as_matrix_of_rows(const at::Tensor& tensor);

class Parameter {
 public:
  // `parts` has one element for an ordinary weight, of one row if there are no `sizes`. With `std` > 0, the initial
  // values are normal with that deviation; with 0, all are `fill`.
  Parameter(std::vector<ParameterPart> parts, std::vector<int64_t> sizes, at::ScalarType dtype, double std,
            double fill = 0);

  // A weight that starts as `initial` for any seed.
  Parameter(std::string name, at::Tensor initial);

  // A tensor that changes in training without being trained (a batch norm's running statistics). Only forward writes
  // it, and only in training. It is loaded, saved and checkpointed under its name. The optimizer, the gradient norm,
  // freezing and adapters ignore it. It may have any dtype, including int64, and no dimensions; value and master are
  // one tensor.
  static Parameter buffer(const std::string& name, std::vector<int64_t> sizes, at::ScalarType dtype, double fill);
  bool is_buffer() const { return is_buffer_; }

  // How many of a step's tokens chose each expert of a router: (experts), int64. A buffer to which F adds, and which no
  // file holds, as it is 0 between steps. `correction`, a frozen parameter of the same layer, is added to the scores.
  static Parameter expert_tokens(Parameter& correction, double rate);
  bool counts_tokens() const { return corrected_ != nullptr; }
  // The correction grows by the rate for experts that fewer tokens chose than the mean, and shrinks for those that more
  // chose (arXiv 2408.15664, algorithm 1). The counts are those of all replicas; then they are forgotten.
  void balance();
  void forget_tokens() { value.zero_(); }
  // Whether counts of tokens change it at the end of a step.
  bool is_corrected() const { return is_corrected_; }

  const std::string& name() const { return parts_.front().name; }
  // What files hold.
  const std::vector<ParameterPart>& parts() const;
  const std::vector<int64_t>& sizes() const { return sizes_; }
  // Matrices decay; norm gains do not.
  bool decays() const { return decays_ && sizes_.size() > 1; }
  // Switches weight decay off for a matrix that is not used in a product, such as a scan's decay rates.
  void never_decay() { decays_ = false; }
  // Says how the weight is used, if it is no factor of a product, or if its rows are looked up. Neither holds for
  // positions that are added, and both for an embedding that is tied to the head.
  void used_as(bool factor, bool table) {
    factor_ = factor;
    table_ = table;
  }
  bool is_table() const { return table_; }
  // Whether it is a matrix that multiplies activations.
  bool multiplies() const { return sizes_.size() == 2 && decays_ && factor_; }
  // Whether the weight of a product is stored as (in, out) in place of (out, in).
  bool transposed() const { return transposed_; }
  void store_transposed() { transposed_ = true; }
  // Before allocate_value, for a weight of four dimensions: value, master and gradient are stored in channels-last
  // order in place of contiguous.
  void store_channels_last() { channels_last_ = true; }
  // Fills the rows of each part with their initial values, in place of `std` and `fill`. The generator depends on the
  // seed and the part's name alone.
  using Initializer = std::function<void(at::Tensor& rows, at::Generator& generator)>;
  void initialize_with(Initializer initializer) { initializer_ = std::move(initializer); }
  int64_t numel() const;
  // The rows of each part within `whole`, which is the parameter or a tensor of its shape.
  std::vector<std::pair<std::string, at::Tensor>> parts_of(const at::Tensor& whole) const;
  // The matrix of each projection within `whole`, a matrix: (outputs, inputs), (inputs, outputs), or (groups, outputs
  // of a group, inputs). Views.
  std::vector<at::Tensor> projections_of(const at::Tensor& whole) const;
  // A frozen parameter has no gradient, no W and no optimizer state, and no counts correct it.
  bool trainable() const { return trainable_; }
  void freeze() { trainable_ = is_corrected_ = false; }
  // Says that the rows are those of `count` experts, a part of the layer's. If there are other parts, on other
  // replicas, the gradient has one part for each replica of the group, whose tokens it comes from (grad_by_source).
  void hold_experts(int64_t count, ExpertShare share) {
    experts_ = count;
    share_ = share;
  }
  int64_t experts() const { return experts_; }  // 0: it is no expert's
  const ExpertShare& share() const { return share_; }
  // Before allocate_value: the master keeps its numbers also if the parameter is frozen.
  void keep_master() { keeps_master_ = true; }
  // Shares the master of another use of the weight, and the value, unless that is of another dtype. From
  // then on, first.refresh_value() refreshes both.
  void tie_to(Parameter& first);
  bool is_tied() const { return is_tied_; }
  // Lets the gradient be that of `other`, the weight's only other use. What this use adds is kept apart
  // until join_grad(): rows that were looked up as they come, or a table if they are as many as its rows.
  void share_grad(const Parameter& other);
  bool shares_grad() const { return shares_grad_; }
  // Adds what was kept apart to the common gradient, when the other use has added all. If that was a table, the next
  // steps need one, too, which this allocates.
  void join_grad();

  at::Tensor value;   // used by layers, in their dtype; undefined until allocate_value
  at::Tensor master;  // updated by the optimizer and held by files: `value` itself, or the float32 numbers that `value`
                      // is rounded from; always `value` if frozen, unless keep_master()
  at::Tensor grad;    // in master's dtype; undefined until allocate_grad; valid only if has_grad()
  // (members of the group, the sizes of grad): the gradients of each one's tokens. `grad` is the first of them, and
  // their sum once GradientReducer has added all. Undefined if this replica has all of the experts.
  at::Tensor grad_by_source;

  // The values depend on the seed and the part's name alone, not on the stage or the order of calls.
  void allocate_value(uint64_t seed);
  void allocate_grad();
  // Moves the parameter to the device's memory, after allocate_value. The contents of the gradient are lost.
  void move_to(at::Device device);
  // Rounds `master` into `value`, if they differ, and into those of tied uses.
  void refresh_value();

  // The first contribution of a step overwrites the gradient and the others add to it, so it is never zeroed.
  bool has_grad() const { return has_grad_; }
  // Of all parts of the gradient, if it has memory.
  size_t grad_bytes() const {
    const at::Tensor& all = grad_by_source.defined() ? grad_by_source : grad;
    return all.defined() ? all.nbytes() : 0;
  }
  void forget_grad();
  // From now on the gradient has memory only from its first contribution until forget_grad().
  void stream_grad();
  bool streams_grad() const { return streams_grad_; }
  // The gradient's memory, which a streamed one gets only now.
  at::Tensor& grad_memory();
  // For a gradient that was written by replaying a graph (WorkGraph), and not through this object.
  void mark_grad_written() { has_grad_ = true; }

  // grad (+)= a @ b, for a (rows, n) and b (n, cols) of the layer's dtype. On a CPU, each call rounds to that dtype at
  // most once, on a GPU not at all; the sum has grad's dtype. A gradient of more dimensions counts as (rows, the rest
  // in memory order).
  void accumulate_product(const at::Tensor& a, const at::Tensor& b);
  // grad (+)= gradient, which has grad's shape and any float dtype.
  void accumulate(const at::Tensor& gradient);
  // The buffer, and whether to add to it. If not, the caller writes all of it.
  std::pair<at::Tensor, bool> grad_to_write();
  // The same of grad_by_source, as one matrix; of grad, if there is none.
  std::pair<at::Tensor, bool> grad_by_source_to_write();
  // Row ids[i] of grad += rows[i], one after the other.
  void accumulate_rows(const at::Tensor& ids, const at::Tensor& rows);
  // The buffer to add to. It is zeroed before the step's first contribution.
  at::Tensor& grad_to_add();
  // While enabled, contributions are dropped: for a repeated backward-p1 (see Recompute).
  void discard_gradients(bool discard);

 private:
  // An uninitialized tensor in the dtype of the sums.
  at::Tensor empty_like_this() const;
  // Where contributions go that are not rows.
  at::Tensor& table();

  std::vector<ParameterPart> parts_;
  std::vector<int64_t> sizes_;
  at::ScalarType dtype_;
  double std_;
  double fill_;
  bool has_grad_ = false;
  bool streams_grad_ = false;
  bool trainable_ = true;
  bool is_buffer_ = false;
  bool is_corrected_ = false;
  Parameter* corrected_ = nullptr;
  double rate_ = 0;
  bool keeps_master_ = false;
  bool decays_ = true;
  bool table_ = false;
  bool factor_ = true;
  bool transposed_ = false;
  bool channels_last_ = false;
  bool discards_ = false;
  int64_t experts_ = 0;
  ExpertShare share_;
  bool is_tied_ = false;
  bool shares_grad_ = false;
  bool joined_ = false;                                  // in this step
  std::vector<Parameter*> tied_;                         // uses whose value is another rounding of this master
  std::vector<std::pair<at::Tensor, at::Tensor>> rows_;  // ids and their rows; see share_grad
  at::Tensor apart_;                                     // the table in their place
  bool keeps_table_ = false;                             // join_grad() has allocated it
  at::Tensor discarded_;                                 // returned by grad_to_add() while gradients are discarded
  at::Tensor initial_;
  Initializer initializer_;
};

}  // namespace twobp
