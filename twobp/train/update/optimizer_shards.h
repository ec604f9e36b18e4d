// Optimizer state divided among the data-parallel replicas of a rank (ZeRO stage 1, arXiv 1910.02054, section
// 5.1): each replica keeps the state of its share of the rank's parameters, updates those alone, and hands
// their new values to the others. All replicas have the same gradients by then, so the bits are those of an
// update that every replica makes by itself.
#pragma once

#include <cstdint>
#include <vector>

#include "twobp/nn/parameter.h"
#include "twobp/transport/transport.h"

namespace twobp {

// The replica that keeps each parameter's state: largest first, each to the replica that has least, so that
// no two differ by more than the largest. Depends on the sizes alone.
std::vector<int> assign_replicas(const std::vector<int64_t>& sizes, int replicas);

class OptimizerShards {
 public:
  // `parameters`: what the rank trains, each value once, the same on every replica. `replicas` outlives this.
  OptimizerShards(Transport& replicas, std::vector<Parameter*> parameters);

  // By index into the parameters: the replica that keeps its state.
  const std::vector<int>& owners() const { return owners_; }
  bool owns(size_t parameter) const { return owners_[parameter] == replicas_.rank(); }

  // After this replica has updated its share: sends it. The others may still read it afterwards: it must not
  // change before the next step's gradients were summed over the replicas, in which each takes part after its
  // receive().
  void send(int64_t step);
  // Takes the other replicas' shares, gradients of which are forgotten. Throws Aborted, or Error after
  // `timeout` seconds.
  void receive(int64_t step, double timeout);
  // Of a step that is not taken.
  void forget_gradients();

 private:
  // Parameters of one replica that go in one message.
  struct Message {
    int owner = 0;
    std::vector<Parameter*> parameters;
  };

  Transport& replicas_;
  std::vector<Parameter*> parameters_;
  std::vector<int> owners_;
  std::vector<Message> messages_;
};

}  // namespace twobp
