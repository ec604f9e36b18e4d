// Optimizer state divided among the data-parallel replicas of a rank (ZeRO stage 1, arXiv 1910.02054, section 5.1).
// Each replica keeps the state of its share of the rank's numbers, gets the summed gradients of that share alone,
// updates it, and sends the new values to the others. Sums have the same order, so the bits are those of replicas that
// update everything. Weights that are computed with in 16 bits travel in 16 bits, and only the replica that updates
// them has their float32 numbers.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
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
  // updates. `tied`: those whose masters stay whole. `replicas` must outlive this.
  OptimizerShards(Transport& replicas, std::vector<Parameter*> parameters, const std::vector<UpdateCost>& costs,
                  const std::set<const Parameter*>& tied = {});

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

  // Of a parameter that this replica does not update whole: drops the float32 master and returns its share of it. What
  // it returns is undefined if the master stays, or the replica has no share.
  at::Tensor keep_own_master(Parameter& parameter);
  // Between steps, on all replicas: every value follows its master, which its owner has changed.
  void refresh_values(const Patience& patience);
  // Between steps, on all replicas: every parameter has its whole master, in the memory of its gradient.
  void take_masters(const Patience& patience);
  // Ends that. What others have written to the masters stays. Waits until all replicas have theirs, if there is a
  // patience.
  void give_masters_back(const std::optional<Patience>& patience);

 private:
  struct Piece {
    Parameter* parameter = nullptr;
    Cut cut;

    at::Tensor of(const at::Tensor& tensor) const { return numbers_between(tensor, cut.begin, cut.end); }
  };
  // The pieces of one replica that travel in one message.
  struct Message {
    int owner = 0;
    std::vector<Piece> pieces;
  };

  bool rounded(const Parameter* parameter) const { return rounded_.contains(parameter); }
  // The numbers of a piece that replicas exchange.
  at::Tensor travelling(const Piece& piece) const {
    return piece.of(rounded(piece.parameter) ? piece.parameter->value : piece.parameter->master);
  }
  // The transport's own copies, if they take all weights. Otherwise null.
  GroupSums* own_copies() const;
  // Sends this replica's pieces, as this function gives them; undefined ones stay. Receives the others' into the same.
  template <typename Of>
  void send_pieces(int64_t step, const Of& of);
  template <typename Of>
  void receive_pieces(int64_t step, const Patience& patience, const Of& of);

  Transport& replicas_;
  std::optional<GroupSum> copies_;  // of the step's weights, if the transport has copies of its own
  std::vector<Parameter*> parameters_;
  std::map<const Parameter*, std::vector<Cut>> cuts_;
  std::vector<Message> messages_;
  std::set<const Parameter*> rounded_;     // whose values are rounded from masters that only their owners have
  std::map<Parameter*, at::Tensor> kept_;  // this replica's shares of masters, undefined if it has none
  int64_t exchanges_ = 0;                  // between steps
};

}  // namespace twobp
