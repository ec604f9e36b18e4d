// Optimizer state divided among the data-parallel replicas of a rank (ZeRO stage 1, arXiv 1910.02054, section 5.1).
// Each replica keeps the state of its share of the rank's numbers, gets the summed gradients of that share alone,
// updates it, and sends the new values to the others. Sums have the same order, so the bits are those of replicas that
// update everything.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "twobp/nn/parameter.h"
#include "twobp/pipeline/gradient_reducer.h"
#include "twobp/transport/collectives.h"

namespace twobp {

// A parameter to be shared out.
struct UpdateCost {
  int64_t numbers = 0;
  int64_t work = 0;  // of an update that needs the whole parameter and takes long for its numbers (muon_work), or 0
  int64_t unit = 1;  // it may be cut at multiples of this
};

// The numbers of each parameter that each replica updates, in rising order. Parameters with work stay whole and go, by
// falling work, to the replica with the least of it. The others are cut so that all replicas get equal numbers: those
// of every group of neighbours, the last first, in the order of the replicas. So while the gradients become complete,
// each replica always receives. Depends on the costs alone.
std::vector<std::vector<Cut>> share_out(const std::vector<UpdateCost>& costs, int replicas);

class OptimizerShards {
 public:
  // `parameters` are those that the rank trains, each value once, the same on every replica, and `costs` those of their
  // updates. `replicas` must outlive this.
  OptimizerShards(Transport& replicas, std::vector<Parameter*> parameters, const std::vector<UpdateCost>& costs);

  const std::vector<Cut>& cuts_of(const Parameter* parameter) const { return cuts_.at(parameter); }
  // What this replica updates of the parameter. Null: nothing.
  const Cut* own(const Parameter* parameter) const;

  // Sends this replica's share after it has been updated. The others may still read it afterwards. So it must not
  // change before this replica has heard from all others in the next step's sums; each replica joins these after its
  // receive().
  void send(int64_t step);
  // Receives the other replicas' shares and forgets their gradients. Throws Aborted, or Error after the time-out.
  void receive(int64_t step, const Patience& patience);
  // Forgets the gradients of a step that is not taken.
  void forget_gradients();

 private:
  struct Piece {
    Parameter* parameter = nullptr;
    Cut cut;

    at::Tensor master() const { return numbers_between(parameter->master, cut.begin, cut.end); }
  };
  // The pieces of one replica that travel in one message.
  struct Message {
    int owner = 0;
    std::vector<Piece> pieces;
  };

  // The transport's own copies, if they take all weights. Otherwise null.
  GroupSums* own_copies() const;
  // What a receive ends with.
  void take_over() const;

  Transport& replicas_;
  std::optional<GroupSum> copies_;  // of the step's weights, if the transport has copies of its own
  std::vector<Parameter*> parameters_;
  std::map<const Parameter*, std::vector<Cut>> cuts_;
  std::vector<Message> messages_;
};

}  // namespace twobp
