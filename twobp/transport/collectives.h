// Operations of all ranks of a transport together. They are made of messages, so that every transport has them, and a
// sum is taken in rank order, so that its bits do not depend on the transport or on the order of arrival. Only if the
// transport has sums of its own for these ranks and tensors (group_sums.h), AllReduce and ReduceScatter use those, in
// their order. All ranks call the same operations in the same order. `number`, from 1, distinguishes operations that
// are under way at the same time (all_reduce_sum uses 0).
#pragma once

#include <cstdint>
#include <memory>
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
  // The same of `instead_`.
  bool instead_ended(double deadline);
  // Receives a message. The second one checks that it fits these tensors of this rank, and makes it flat.
  bool take(int from, MessageKind kind, double deadline, Values& into);
  bool take(int from, MessageKind kind, double deadline, const Values& like, Values& into);
  // Receives the others' parts of what this rank sums. Returns whether all are there.
  bool take_parts(double deadline, const Values& mine);

  Transport* transport_;
  int number_;
  WaitCause cause_;
  std::unique_ptr<Wait> instead_;  // another way to the same sum
  std::vector<Values> parts_;      // by rank: its values of what this rank sums
  MessageKind awaited_ = MessageKind::kPart;
  int from_ = 0;      // the rank whose message is awaited
  double grace_ = 0;  // seconds after the time-out in which a rank that knows better which one is missing may say so
  bool done_ = false;
};

// One exchange of all ranks over a binary tree: values go up to the root, and a sum comes down. All ranks together send
// 2 (n - 1) messages, and one of them three at most. Messages of other ranks are as long as those of few.
class Exchange : public SumOfRanks {
 public:
  enum class Adds : uint8_t {
    // On the way up. So the order must not show: each number is zero on all ranks but one, or all are whole, at most
    // 2^53.
    kOnTheWay,
    kInRankOrder,  // the root adds, and receives the tensors of all ranks
  };
  // Sums `numbers`, dense and of one shape and dtype, in place. They are read until they are the sum. `notes` go to the
  // root; every rank has as many, of the same dtypes, of any length. `order`: the ranks by their places in the tree,
  // the root first; empty: rising.
  Exchange(Transport& transport, at::Tensor numbers, int number, WaitCause cause, Adds adds = Adds::kOnTheWay,
           Values notes = {}, std::vector<int> order = {});

  // By rank: what it noted, flat. Only on the root, when the exchange is done.
  const std::vector<Values>& notes() const { return notes_of_; }

 private:
  bool advance(double deadline) override;
  // Whether the parts of all children have been joined and sent on.
  bool go_up(double deadline);
  void join(const Values& part, int from);
  void read_notes();

  at::Tensor numbers_;
  Adds adds_;
  std::vector<int> order_;
  int place_ = 0;
  at::Tensor sum_;  // of this rank and those below it
  // Of the same ranks, in the order in which they were joined: each note's lengths, and the notes joined to one tensor.
  std::vector<int64_t> lengths_;
  std::vector<Values> joined_;  // by note
  size_t children_ = 0;         // those joined
  bool went_up_ = false;
  std::vector<Values> notes_of_;
};

// An element-wise sum of which every rank owns a slice. It receives the others' parts of the slice, adds them and sends
// the result to all.
class SumBySlices : public SumOfRanks {
 protected:
  using SumOfRanks::SumOfRanks;
  void expect_sums();
  // Of this rank's tensor: where the sum of the slice that `rank` owns belongs.
  virtual at::Tensor sum_for(int rank) const = 0;
  // The sum of this rank's slice is there: goes to all.
  void send_sum(const at::Tensor& sum);
  // Whether all other sums are there. Waits for them until the deadline, unless that is 0.
  bool take_sums(double deadline);

 private:
  std::vector<bool> summed_there_;  // by rank: its summed slice has arrived
};

// An element-wise sum by slices, each in rank order. So a rank sends 2 (n - 1) / n times the tensor's bytes. A few
// ranks send small tensors whole to each other. More ranks make an Exchange of them.
class AllReduce : public SumBySlices {
 public:
  // Starts the sum. `tensor` is dense and has the same shape and dtype on every rank. It is read until it contains the
  // sum.
  AllReduce(Transport& transport, at::Tensor tensor, int number, WaitCause cause = WaitCause::kGradients);

 private:
  // The slice of this rank's tensor that `rank` sums.
  at::Tensor part_for(int rank) const;
  at::Tensor sum_for(int rank) const override { return part_for(rank); }
  bool advance(double deadline) override;

  at::Tensor flat_;
  bool whole_ = false;  // each rank sends its whole tensor to each other
  bool added_ = false;  // this rank's slice is summed
};

// An element-wise sum of several terms of each rank, (terms, ...), in the order of the ranks, and within a rank of its
// terms. Their number is the same on every rank. The sum takes the place of the first term.
class AllReduceOfTerms : public SumBySlices {
 public:
  AllReduceOfTerms(Transport& transport, const at::Tensor& terms, int number);

 private:
  // The slice of this rank's terms that `rank` sums: (terms, numbers).
  at::Tensor part_for(int rank) const;
  at::Tensor sum_for(int rank) const override { return part_for(rank)[0]; }
  bool advance(double deadline) override;

  at::Tensor terms_;  // (terms, numbers)
  bool added_ = false;
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

// An Exchange of `numbers` alone, by way of Adds::kOnTheWay.
void sum_on_the_way(Transport& transport, const at::Tensor& numbers, const Patience& patience,
                    WaitCause cause = WaitCause::kMessage);

// Copies `tensor` of rank `root` to every rank, down a binary tree. It may have any shape and dtype, which the other
// ranks need not know.
void broadcast(Transport& transport, at::Tensor& tensor, int root, const Patience& patience);

// Returns the values by rank on `root`, and nothing elsewhere. Shapes may differ.
std::vector<Values> gather(Transport& transport, Values values, int root, const Patience& patience);

// Returns when every rank has called it.
void barrier(Transport& transport, const Patience& patience);

}  // namespace twobp
