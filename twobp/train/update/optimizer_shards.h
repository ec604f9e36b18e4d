// Optimizer state divided among the data-parallel replicas of a rank (ZeRO stage 1, arXiv 1910.02054, section 5.1).
// Each replica keeps the state of its share of the rank's parameters, gets the summed gradients of that share alone,
// updates it, and sends the new values to the others. Sums have the same order, so the bits are those of replicas that
// update everything.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "twobp/nn/parameter.h"
#include "twobp/transport/collectives.h"

namespace twobp {

struct UpdateCost {
  int64_t numbers = 0;
  int64_t work = 0;  // of an update that takes long for its numbers (muon_work), or 0
};

// The replica that keeps each parameter's state. Parameters are assigned by falling work, and those without from the
// largest on, each to the replica with the least work, or with the least numbers. So no two replicas differ by more
// work than the longest update has, nor, where nothing has work, by more than the largest parameter. Depends on the
// costs alone.
std::vector<int> assign_replicas(const std::vector<UpdateCost>& costs, int replicas);

class OptimizerShards {
 public:
  // `parameters` are those that the rank trains, each value once, the same on every replica, and `costs` those of their
  // updates. `replicas` must outlive this.
  OptimizerShards(Transport& replicas, std::vector<Parameter*> parameters, const std::vector<UpdateCost>& costs);

  // The replica that keeps the state of a parameter.
  int owner_of(const Parameter* parameter) const { return owners_.at(parameter); }
  bool owns(const Parameter* parameter) const { return owner_of(parameter) == replicas_.rank(); }

  // Sends this replica's share after it has been updated. The others may still read it afterwards. So it must not
  // change before this replica has heard from all others in the next step's sums; each replica joins these after its
  // receive().
  void send(int64_t step);
  // Receives the other replicas' shares and forgets their gradients. Throws Aborted, or Error after the time-out.
  void receive(int64_t step, const Patience& patience);
  // Forgets the gradients of a step that is not taken.
  void forget_gradients();

 private:
  // The parameters of one replica that travel in one message.
  struct Message {
    int owner = 0;
    std::vector<Parameter*> parameters;
  };

  // The transport's own copies, if they take all weights. Otherwise null.
  GroupSums* own_copies() const;
  // What a receive ends with.
  static void take_over(Parameter& parameter);

  Transport& replicas_;
  std::optional<GroupSum> copies_;  // of the step's weights, if the transport has copies of its own
  std::vector<Parameter*> parameters_;
  std::map<const Parameter*, int> owners_;
  std::vector<Message> messages_;
};

}  // namespace twobp
