// Internal to this folder: walks along a recorded order of ops beside the schedule.
#pragma once

#include <vector>

#include "twobp/schedule/simulate/simulate.h"

namespace twobp {

class RecordedOrder {
 public:
  // Throws Error for an order that does not belong to the schedule.
  RecordedOrder(const Schedule& schedule, const std::vector<std::vector<RecordedOp>>& recorded);

  bool empty() const { return recorded_.empty(); }
  // The W that ran next, before any other F or I; null when there is none.
  const RecordedOp* next_w(int rank) const;
  void take_w(int rank) { ++at_[rank]; }
  // Whether receives were recorded of the rank; then W keeps its side of them.
  bool has_receives(int rank) const { return !has_receives_.empty() && has_receives_[rank]; }
  // The receive that is done now in the schedule; passed over where it was not recorded.
  void take_receive(int rank, Op op, int stage, int micro_batch);
  // The F or I that runs now in the schedule. Throws Error when another one was recorded.
  void take(int rank, Op op, int stage, int micro_batch);

 private:
  const std::vector<std::vector<RecordedOp>>& recorded_;
  std::vector<size_t> at_;  // by rank
  std::vector<bool> has_receives_;
};

}  // namespace twobp
