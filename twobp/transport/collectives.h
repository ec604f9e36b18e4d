// Operations of all ranks of a transport together. They are made of messages, so that every transport has them, and a
// sum is taken in rank order, so that its bits do not depend on the transport or on the order of arrival. Only if the
// transport has sums of its own for these ranks and tensors (group_sums.h), AllReduce and ReduceScatter use those, in
// their order. All ranks call the same operations in the same order. `number`, from 1, distinguishes operations that
// are under way at the same time (all_reduce_sum uses 0).
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/ATen.h>

#include "twobp/nn/device/device.h"
#include "twobp/transport/transport.h"

namespace twobp {

// Sums and copies that all ranks of a group make together by a library, which knows faster ways between many GPUs than
// messages (collectives.h). All ranks call the same operations in the same order. The library sums in an order of its
// own, which should repeat on the same machines with the same library, but not elsewhere.
class GroupSums {
 public:
  virtual ~GroupSums() = default;

  // Whether the library takes such a tensor. It depends on its device and dtype alone.
  virtual bool takes(const at::Tensor& tensor) const = 0;

  // Each of these begins when the work is done that the caller has launched in its current stream, and works in place.
  // The tensors fill their memory without gaps, and have the same sizes and dtypes on every rank. They are kept until
  // the event has been seen to pass. Throws Aborted, and Error for tensors that do not fit.
  virtual DeviceEvent all_reduce(const at::Tensor& tensor) = 0;
  // Of each tensor, only that of its owner becomes the sum. The others stay as they are.
  virtual DeviceEvent reduce(const std::vector<at::Tensor>& tensors, const std::vector<int>& owners) = 0;
  // Each tensor becomes that of its root.
  virtual DeviceEvent broadcast(const std::vector<at::Tensor>& tensors, const std::vector<int>& roots) = 0;

  // Whether an operation is done. Never blocks. Throws Aborted.
  virtual bool passed(const DeviceEvent& done) = 0;
  // Waits until it is done. Throws Aborted, or after `timeout` seconds Error.
  virtual void wait(const DeviceEvent& done, double timeout) = 0;
};

// A sum under way by the transport's own means.
class GroupSum {
 public:
  GroupSum(GroupSums& sums, DeviceEvent done) : sums_(&sums), done_(std::move(done)) {}
  bool passed() const { return sums_->passed(done_); }
  void wait(double timeout) const { sums_->wait(done_, timeout); }

 private:
  GroupSums* sums_;
  DeviceEvent done_;
};

// An element-wise sum under way. Every rank owns a slice. It receives the others' parts of the slice, adds them in rank
// order and sends the result to all. So a rank sends 2 (n - 1) / n times the tensor's bytes. Small tensors are sent
// whole from each rank to each.
class AllReduce {
 public:
  // Starts the sum. `tensor` is dense and has the same shape and dtype on every rank. It is read until it contains the
  // sum.
  AllReduce(Transport& transport, at::Tensor tensor, int number);

  // Processes what has arrived. Returns true when the tensor contains the sum. Never blocks. Throws Aborted.
  bool progress();
  // Throws Aborted, or after `timeout` seconds Error that names the rank it waited for, or
  // all ranks.
  void wait(double timeout);
  bool done() const { return done_; }

 private:
  // The slice of this rank's tensor that `rank` sums.
  at::Tensor part_for(int rank) const;
  bool advance(double deadline);  // 0: with what has already arrived

  Transport* transport_;
  std::optional<GroupSum> group_;  // instead of messages
  at::Tensor tensor_;
  at::Tensor flat_;
  int number_;
  bool whole_ = false;
  std::vector<Values> parts_;       // by rank: its part of this rank's slice, one tensor
  std::vector<bool> summed_there_;  // by rank: its summed slice has arrived
  bool added_ = false;              // this rank's slice is summed
  bool done_ = false;
};

// Element-wise sums under way of tensors that have one owner each. A rank sends its values of a tensor to the tensor's
// owner, which adds all in rank order, in place. So a rank sends half the bytes of an AllReduce. On other ranks than
// its owner, a tensor keeps that rank's own values, which the owner may still read when this is done: they may change
// after a message of the owner that it has sent after its sums.
class ReduceScatter {
 public:
  // The tensors are dense, of one dtype, and the same on every rank. `owners`: by tensor.
  ReduceScatter(Transport& transport, std::vector<at::Tensor> tensors, const std::vector<int>& owners, int number);

  // As those of AllReduce, for the tensors of this rank.
  bool progress();
  void wait(double timeout);
  bool done() const { return done_; }

 private:
  bool advance(double deadline);

  Transport* transport_;
  std::optional<GroupSum> group_;  // instead of messages
  Values mine_;
  int number_;
  std::vector<Values> parts_;  // by rank: its values of this rank's tensors
  bool done_ = false;
};

// The transport's own sums over all its ranks, if they take such tensors. Otherwise null.
GroupSums* group_sums_for(Transport& transport, const at::Tensor& tensor);

// Element-wise sum over ranks in rank order, in place.
void all_reduce_sum(Transport& transport, at::Tensor& tensor, double timeout);

// Copies `tensor` of rank `root` to every rank. It may have any shape and dtype, which the other ranks need not know.
void broadcast(Transport& transport, at::Tensor& tensor, int root, double timeout);

// Returns the values by rank on `root`, and nothing elsewhere. Shapes may differ.
std::vector<Values> gather(Transport& transport, Values values, int root, double timeout);

// Returns when every rank has called it.
void barrier(Transport& transport, double timeout);

}  // namespace twobp
