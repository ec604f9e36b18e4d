// A weight and its gradient. A weight that is used in several places (tied embeddings) is one Parameter per
// use, with the same name and a gradient buffer of its own, so that the uses can be summed in a fixed order.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

namespace twobp {

// Several weights may be stored as one matrix, rows below each other (the projections to q, k and v).
struct ParameterPart {
  std::string name;  // as in Hugging Face's LLaMa: "model.layers.0.self_attn.q_proj.weight"
  int64_t rows = 0;
};

// (rows, the rest) over the same memory, of a dense tensor of two dimensions or, in channels-last order,
// four.
at::Tensor as_matrix_of_rows(const at::Tensor& tensor);

class Parameter {
 public:
  // `parts`: one for an ordinary weight. `std` > 0: normal with that deviation; 0: all `fill`.
  Parameter(std::vector<ParameterPart> parts, std::vector<int64_t> sizes, at::ScalarType dtype, double std,
            double fill = 0);

  // A weight that starts as `initial`, whatever the seed.
  Parameter(std::string name, at::Tensor initial);

  // What training changes though it is not trained (a batch norm's running statistics): written by forward,
  // in training alone; loaded, saved and checkpointed under its name; nothing to the optimizer, the norm,
  // freezing or adapters. Of any dtype, int64 and 0-dimensional too: value and master are one tensor.
  static Parameter buffer(const std::string& name, std::vector<int64_t> sizes, at::ScalarType dtype,
                          double fill);
  bool is_buffer() const { return is_buffer_; }

  const std::string& name() const { return parts_.front().name; }
  const std::vector<ParameterPart>& parts() const { return parts_; }
  const std::vector<int64_t>& sizes() const { return sizes_; }
  // Norm gains are not decayed, matrices are.
  bool decays() const { return decays_ && sizes_.size() > 1; }
  // For a matrix that is no weight of a product, such as a scan's decay rates.
  void never_decay() { decays_ = false; }
  // Fills the rows of each part with their initial values, instead of `std` and `fill`; the generator depends
  // on the seed and the part's name alone.
  using Initializer = std::function<void(at::Tensor& rows, at::Generator& generator)>;
  void initialize_with(Initializer initializer) { initializer_ = std::move(initializer); }
  int64_t numel() const;
  // The parts with their rows of `whole`, which is the parameter or something of its shape.
  std::vector<std::pair<std::string, at::Tensor>> parts_of(const at::Tensor& whole) const;
  // A frozen parameter has no gradient, no W and no optimizer state.
  bool trainable() const { return trainable_; }
  void freeze() { trainable_ = false; }

  at::Tensor value;   // what layers compute with, of their dtype; undefined until allocate_value
  at::Tensor master;  // what the optimizer updates and files hold: `value` itself, or in float32 what
                      // `value` is rounded from; of a frozen parameter always `value`
  at::Tensor grad;    // of master's dtype; undefined until allocate_grad; meaningful only if has_grad()

  // Values depend on the seed and the part's name alone, whatever the stage and the order of calls.
  void allocate_value(uint64_t seed);
  void allocate_grad();
  // Into this device's memory, behind allocate_value; what the gradient holds is lost.
  void move_to(at::Device device);
  // Rounds `master` into `value`, where they differ.
  void refresh_value();

  // A gradient is written by its first contribution of a step and added to by the others: no pass to zero it.
  bool has_grad() const { return has_grad_; }
  void forget_grad() { has_grad_ = false; }
  // It has been written by a graph that was put in again (see WorkGraph), not through this object.
  void has_grad_from_elsewhere() { has_grad_ = true; }

  // grad (+)= a @ b, for a (rows, n) and b (n, cols) of the layer's dtype: rounded to it at most once a
  // call, summed in grad's. A gradient of more dimensions counts as (rows, the rest in memory's order).
  void accumulate_product(const at::Tensor& a, const at::Tensor& b);
  // grad (+)= gradient, of grad's shape and any float dtype.
  void accumulate(const at::Tensor& gradient);
  // The buffer to add into: zeroed if this is the step's first contribution.
  at::Tensor& grad_to_add();
  // While it discards, contributions go nowhere: for a backward-p1 that is run again (see Recompute).
  void discard_gradients(bool discard);

 private:
  // Uninitialized, of the sums' dtype. Weights of convolutions lie with their channels last: a matrix of rows
  // to the kernels.
  at::Tensor empty_like_this() const;

  std::vector<ParameterPart> parts_;
  std::vector<int64_t> sizes_;
  at::ScalarType dtype_;
  double std_;
  double fill_;
  bool has_grad_ = false;
  bool trainable_ = true;
  bool is_buffer_ = false;
  bool decays_ = true;
  bool discards_ = false;
  at::Tensor discarded_;  // what grad_to_add() hands out meanwhile
  at::Tensor initial_;
  Initializer initializer_;
};

}  // namespace twobp
