// Internal to this folder: follows a recorded order of ops along with the schedule.
#pragma once

#include <vector>

#include "twobp/schedule/simulate/simulate.h"

namespace twobp {

class RecordedOrder {
 public:
  // Throws Error if the order does not belong to the schedule.
  RecordedOrder(const Schedule& schedule, const std::vector<std::vector<RecordedOp>>& recorded);

  bool empty() const { return recorded_.empty(); }
  // The W that ran next, before any other F or I. Null if there is none.
  const RecordedOp* next_w(int rank) const;
  void take_w(int rank) { ++at_[rank]; }
  // Whether the rank's receives were recorded. If so, W stays before or after them as recorded.
  bool has_receives(int rank) const { return !has_receives_.empty() && has_receives_[rank]; }
  // Takes the receive that the schedule does now. Does nothing if it was not recorded.
  void take_receive(int rank, Op op, int stage, int micro_batch);
  // Takes the F or I that the schedule runs now. Throws Error if another one was recorded.
  void take(int rank, Op op, int stage, int micro_batch);

 private:
  const std::vector<std::vector<RecordedOp>>& recorded_;
  std::vector<size_t> at_;  // by rank
  std::vector<bool> has_receives_;
};

}  // namespace twobp
