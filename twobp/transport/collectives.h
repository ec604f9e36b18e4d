// Operations of all ranks of a transport together, made of messages alone: every transport has them, and a
// sum has the same bits on each, since it is taken in rank order whatever arrives when. All ranks call the
// same operations in the same order; `number` tells apart those that are under way at once, from 1 (0 is
// all_reduce_sum's).
#pragma once

#include <cstdint>
#include <vector>

#include "twobp/transport/transport.h"

namespace twobp {

// An element-wise sum under way. Every rank owns a slice: it gets the others' parts of it, adds them in rank
// order and hands the result round, so that a rank sends 2 (n - 1) / n times the tensor's bytes.
// Small tensors go whole from each rank to each.
class AllReduce {
 public:
  // Starts it. `tensor` is dense and of the same shape and dtype on every rank; it is read until the sum
  // stands in it.
  AllReduce(Transport& transport, at::Tensor tensor, int number);

  // Takes what has arrived; true when the sum stands in the tensor. Never blocks. Throws Aborted.
  bool progress();
  // Throws Aborted, or Error after `timeout` seconds, saying which rank it waited for.
  void wait(double timeout);
  bool done() const { return done_; }

 private:
  // What `rank` adds up: a slice of this rank's tensor.
  at::Tensor part_for(int rank) const;
  // `deadline` 0: only what is there.
  bool take(int from, const Tag& tag, double deadline, at::Tensor& into);
  bool advance(double deadline);

  Transport* transport_;
  at::Tensor tensor_;
  at::Tensor flat_;
  int number_;
  bool whole_ = false;
  std::vector<at::Tensor> parts_;   // by rank: its part of this rank's slice
  std::vector<bool> summed_there_;  // by rank: its slice of the sum has arrived
  bool added_ = false;              // this rank's slice is summed
  bool done_ = false;
};

// Element-wise sum over ranks in rank order, in place.
void all_reduce_sum(Transport& transport, at::Tensor& tensor, double timeout);

// `tensor` of rank `root` on every rank; of any shape and dtype, which need not be known elsewhere.
void broadcast(Transport& transport, at::Tensor& tensor, int root, double timeout);

// By rank, on `root`; empty elsewhere. Shapes may differ.
std::vector<Values> gather(Transport& transport, Values values, int root, double timeout);

// Returns when every rank has called it.
void barrier(Transport& transport, double timeout);

}  // namespace twobp
