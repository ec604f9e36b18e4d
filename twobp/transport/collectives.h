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

#include "twobp/core/wait.h"
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
class GroupSum : public Wait {
 public:
  GroupSum(GroupSums& sums, DeviceEvent done) : sums_(&sums), done_(std::move(done)) {}
  WaitCause cause() const override { return WaitCause::kMessage; }
  bool ready() override { return sums_->passed(done_); }
  void block(double seconds) override { sums_->wait(done_, seconds); }
  [[noreturn]] void fail(double timeout) const override;

 private:
  GroupSums* sums_;
  DeviceEvent done_;
};

// A sum of ranks under way. Looking for it and waiting throw Aborted. The errors of a time-out name the rank that is
// missing, or all ranks.
class SumOfRanks : public Wait {
 public:
  WaitCause cause() const override { return cause_; }
  // Processes what has arrived. Returns true when the tensors contain the sum.
  bool ready() override { return done_ || (done_ = advance(0)); }
  void block(double seconds) override;
  [[noreturn]] void fail(double timeout) const override;

 protected:
  SumOfRanks(Transport& transport, int number, WaitCause cause)
      : transport_(&transport), number_(number), cause_(cause), parts_(transport.size()) {}
  // Whether all is there. Waits for it until the deadline, unless that is 0.
  virtual bool advance(double deadline) = 0;
  // The same of `group_`.
  bool group_ended(double deadline);
  // Takes the other ranks' parts of what this rank sums. Returns whether all are there.
  bool take_parts(double deadline, const Values& mine);

  Transport* transport_;
  int number_;
  WaitCause cause_;
  std::optional<GroupSum> group_;  // instead of messages
  std::vector<Values> parts_;      // by rank: its values of what this rank sums
  MessageKind awaited_ = MessageKind::kPart;
  int from_ = 0;  // the rank whose message is awaited
  bool done_ = false;
};

// An element-wise sum. Every rank owns a slice. It receives the others' parts of the slice, adds them in rank order and
// sends the result to all. So a rank sends 2 (n - 1) / n times the tensor's bytes. Small tensors are sent whole from
// each rank to each.
class AllReduce : public SumOfRanks {
 public:
  // Starts the sum. `tensor` is dense and has the same shape and dtype on every rank. It is read until it contains the
  // sum.
  AllReduce(Transport& transport, at::Tensor tensor, int number, WaitCause cause = WaitCause::kGradients);

 private:
  // The slice of this rank's tensor that `rank` sums.
  at::Tensor part_for(int rank) const;
  bool advance(double deadline) override;

  at::Tensor tensor_;
  at::Tensor flat_;
  bool whole_ = false;
  std::vector<bool> summed_there_;  // by rank: its summed slice has arrived
  bool added_ = false;              // this rank's slice is summed
};

// Element-wise sums of tensors that have one owner each. A rank sends its values of a tensor to the tensor's owner,
// which adds all in rank order, in place. So a rank sends half the bytes of an AllReduce. On other ranks than its
// owner, a tensor keeps that rank's own values, which the owner may still read when this is done: they may change after
// a message of the owner that it has sent after its sums.
class ReduceScatter : public SumOfRanks {
 public:
  // The tensors are dense, of one dtype, and the same on every rank. `owners`: by tensor. Done when this rank's tensors
  // are.
  ReduceScatter(Transport& transport, std::vector<at::Tensor> tensors, const std::vector<int>& owners, int number);

 private:
  bool advance(double deadline) override;

  Values mine_;
};

// The transport's own sums over all its ranks, if they take such tensors. Otherwise null.
GroupSums* group_sums_for(Transport& transport, const at::Tensor& tensor);

// Element-wise sum over ranks in rank order, in place.
void all_reduce_sum(Transport& transport, at::Tensor& tensor, const Patience& patience,
                    WaitCause cause = WaitCause::kGradients);

// Copies `tensor` of rank `root` to every rank. It may have any shape and dtype, which the other ranks need not know.
void broadcast(Transport& transport, at::Tensor& tensor, int root, double timeout);

// Returns the values by rank on `root`, and nothing elsewhere. Shapes may differ.
std::vector<Values> gather(Transport& transport, Values values, int root, double timeout);

// Returns when every rank has called it.
void barrier(Transport& transport, double timeout);

}  // namespace twobp
