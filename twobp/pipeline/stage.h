// A contiguous part of the model on one rank: its layers, and the tensors they saved for each micro-batch.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "twobp/core/check.h"
#include "twobp/models/model.h"
#include "twobp/nn/thrown.h"
#include "twobp/transport/transport.h"

namespace twobp {

class Stage {
 public:
  // Makes layers [first, first + count) of the model and their parameters on `device`. Values depend on `seed` and the
  // parameters' names. Memory is booked on the calling thread, which must be watched.
  Stage(int index, const ModelSpec& model, int first, int count, uint64_t seed, at::Device device = at::kCPU);

  int index() const { return index_; }
  int first_layer() const { return first_; }
  int layer_count() const { return static_cast<int>(layers_.size()); }
  // The first layer with a backward pass. All earlier layers are frozen. layer_count() if the whole stage has no
  // backward pass.
  int first_backward() const { return first_backward_; }
  // Whether the previous stage waits for dL/dx.
  bool gives_gradient() const { return gives_gradient_; }
  Layer& layer(int i) { return *layers_[i]; }
  const std::string& layer_name(int i) const { return names_[i]; }
  // Parameters of layer i in model order.
  const std::vector<Parameter*>& parameters(int i) const { return parameters_[i]; }

  Saved& saved(int micro_batch, int layer) { return *saved_[micro_batch * layer_count() + layer]; }
  // With slices, each Saved follows that of the slice before.
  void prepare_micro_batches(int count, int slices);
  // The slices of this micro-batch up to this one are done, and no I follows.
  void forget_slices(int micro_batch, int layer);
  void release_saved();

 private:
  int index_;
  int first_;
  int first_backward_;
  bool gives_gradient_;
  std::vector<std::string> names_;
  std::vector<std::unique_ptr<Layer>> layers_;
  std::vector<std::vector<Parameter*>> parameters_;
  std::vector<std::unique_ptr<Saved>> saved_;
  int slices_ = 1;
};

// Errors of layers name the layer.

// Runs `body`. Its errors begin with where(), such as "stage 1, layer model.layers.0".
template <typename Where, typename Body>
decltype(auto) naming_layer(const Where& where, const Body& body) {
  try {
    return body();
  } catch (const Aborted&) {
    throw;
  } catch (...) {
    fail(where(), ": ", message_of_thrown());
  }
}

}  // namespace twobp
