#include "twobp/transport/collectives.h"

#include <algorithm>
#include <numeric>

#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/transport/message.h"

namespace twobp {
namespace {

// Below this size, one message to each rank is faster than two rounds of smaller messages.
constexpr int64_t kWholeBytes = 16 << 10;

Tag tag_of(MessageKind kind, int number) {
  return {.micro_batch = number, .kind = kind};
}

// The elements that `rank` sums: [first, first + count).
std::pair<int64_t, int64_t> slice_of(int64_t numel, int ranks, int rank) {
  const int64_t first = numel * rank / ranks;
  return {first, numel * (rank + 1) / ranks - first};
}

// Takes a message whose values have the shapes of `like`. With `deadline` 0, only one that has already arrived.
bool take(Transport& transport, int from, const Tag& tag, double deadline, const Values& like, Values& into) {
  Values values;
  if (!transport.try_receive(from, tag, values)) {
    if (deadline <= 0) return false;
    values = transport.receive(from, tag, std::max(deadline - awake_seconds(), 1e-3));
  }
  TWOBP_CHECK(values.size() == like.size(), "ranks disagree on what they sum: rank ", from, " sent ", values.size(),
              " tensors, but rank ", transport.rank(), " has ", like.size());
  for (size_t i = 0; i < like.size(); ++i) {
    TWOBP_CHECK(values[i].scalar_type() == like[i].scalar_type() && values[i].numel() == like[i].numel(),
                "ranks disagree on what they sum: rank ", from, " sent ", values[i].numel(), " numbers of ",
                toString(values[i].scalar_type()), ", but rank ", transport.rank(), " has ", like[i].numel(), " of ",
                toString(like[i].scalar_type()));
    values[i] = values[i].view({-1});
  }
  into = std::move(values);
  return true;
}

// The sum of the ranks' i-th values, in rank order.
at::Tensor sum_of(const std::vector<Values>& parts, size_t i) {
  at::Tensor sum = parts[0][i] + parts[1][i];
  for (size_t r = 2; r < parts.size(); ++r) sum.add_(parts[r][i]);
  return sum;
}

}  // namespace

GroupSums* group_sums_for(Transport& transport, const at::Tensor& tensor) {
  std::vector<int> all(transport.size());
  std::iota(all.begin(), all.end(), 0);
  GroupSums* const sums = transport.sums_of(all);
  return sums && sums->takes(tensor) ? sums : nullptr;
}

void GroupSum::fail(double timeout) const {
  sums_->wait(done_, 0);
  twobp::fail("a sum of ranks was not there after ", timeout, " s");
}

void SumOfRanks::block(double seconds) {
  done_ = advance(awake_seconds() + seconds);
}

void SumOfRanks::fail(double timeout) const {
  if (group_) group_->fail(timeout);
  fail_waiting(transport_->rank(), timeout, tag_of(awaited_, number_), from_);
}

bool SumOfRanks::group_ended(double deadline) {
  if (deadline <= 0) return group_->ready();
  group_->block(std::max(deadline - awake_seconds(), 0.0));
  return true;
}

bool SumOfRanks::take_parts(double deadline, const Values& mine) {
  for (from_ = 0; from_ < transport_->size(); ++from_) {
    if (from_ == transport_->rank() || !parts_[from_].empty()) continue;
    if (!take(*transport_, from_, tag_of(MessageKind::kPart, number_), deadline, mine, parts_[from_])) return false;
  }
  parts_[transport_->rank()] = mine;
  return true;
}

AllReduce::AllReduce(Transport& transport, at::Tensor tensor, int number, WaitCause cause)
    : SumOfRanks(transport, number, cause), tensor_(std::move(tensor)) {
  TWOBP_CHECK(tensor_.is_contiguous(), "a sum over ranks needs a dense tensor");
  const int ranks = transport.size();
  const int rank = transport.rank();
  if (ranks == 1 || tensor_.numel() == 0) {
    done_ = true;
    return;
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;  // views need no autograd graph
  if (GroupSums* const sums = group_sums_for(transport, tensor_)) {
    group_.emplace(*sums, sums->all_reduce(tensor_));
    return;
  }
  whole_ = static_cast<int64_t>(tensor_.nbytes()) <= kWholeBytes;
  flat_ = tensor_.view({-1});
  summed_there_.assign(ranks, false);
  summed_there_[rank] = true;
  for (int step = 1; step < ranks; ++step) {
    const int to = (rank + step) % ranks;
    // A slice is overwritten only when its sum has come back, and its owner has read it by then. A whole tensor is
    // overwritten with the sum even if the others have not read it yet, so they get a copy.
    at::Tensor part = part_for(to);
    transport.isend(to, tag_of(MessageKind::kPart, number_), {whole_ ? part.clone() : part});
  }
}

at::Tensor AllReduce::part_for(int rank) const {
  if (whole_) return flat_;
  const auto [first, count] = slice_of(flat_.numel(), transport_->size(), rank);
  return flat_.narrow(0, first, count);
}

bool AllReduce::advance(double deadline) {
  if (group_) return group_ended(deadline);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const int ranks = transport_->size();
  const int rank = transport_->rank();
  at::Tensor mine = part_for(rank);
  if (!added_) {
    if (!take_parts(deadline, {mine})) return false;
    const at::Tensor sum = sum_of(parts_, 0);
    mine.copy_(sum);
    parts_.assign(ranks, {});
    added_ = true;
    if (whole_) return true;
    for (int step = 1; step < ranks; ++step) {
      transport_->isend((rank + step) % ranks, tag_of(MessageKind::kSum, number_), {sum});
    }
  }
  awaited_ = MessageKind::kSum;
  for (from_ = 0; from_ < ranks; ++from_) {
    if (summed_there_[from_]) continue;
    Values sum;
    at::Tensor part = part_for(from_);
    if (!take(*transport_, from_, tag_of(MessageKind::kSum, number_), deadline, {part}, sum)) return false;
    part.copy_(sum[0]);
    summed_there_[from_] = true;
  }
  return true;
}

ReduceScatter::ReduceScatter(Transport& transport, std::vector<at::Tensor> tensors, const std::vector<int>& owners,
                             int number)
    : SumOfRanks(transport, number, WaitCause::kGradients) {
  const int ranks = transport.size();
  const int rank = transport.rank();
  const at::AutoDispatchBelowADInplaceOrView below_autograd;  // views need no autograd graph
  for (const at::Tensor& tensor : tensors) TWOBP_CHECK(tensor.is_contiguous(), "a sum over ranks needs a dense tensor");
  if (ranks == 1 || tensors.empty()) {
    done_ = true;
    return;
  }
  if (GroupSums* const sums = group_sums_for(transport, tensors[0])) {
    group_.emplace(*sums, sums->reduce(tensors, owners));
    return;
  }
  std::vector<Values> by_owner(ranks);
  for (size_t i = 0; i < tensors.size(); ++i) by_owner[owners[i]].push_back(tensors[i].view({-1}));
  for (int step = 1; step < ranks; ++step) {
    const int to = (rank + step) % ranks;
    if (!by_owner[to].empty()) transport.isend(to, tag_of(MessageKind::kPart, number_), std::move(by_owner[to]));
  }
  mine_ = std::move(by_owner[rank]);
  done_ = mine_.empty();
}

bool ReduceScatter::advance(double deadline) {
  if (group_) return group_ended(deadline);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (!take_parts(deadline, mine_)) return false;
  for (size_t i = 0; i < mine_.size(); ++i) mine_[i].copy_(sum_of(parts_, i));
  parts_.clear();
  return true;
}

void all_reduce_sum(Transport& transport, at::Tensor& tensor, const Patience& patience, WaitCause cause) {
  at::Tensor dense = tensor.contiguous();
  AllReduce sum(transport, dense, 0, cause);
  wait_for(sum, patience);
  if (!dense.is_same(tensor)) tensor.copy_(dense);
}

void broadcast(Transport& transport, at::Tensor& tensor, int root, double timeout) {
  const Tag tag = tag_of(MessageKind::kBroadcast, root);
  if (transport.rank() != root) {
    tensor = transport.receive(root, tag, timeout).at(0).clone();
    return;
  }
  const at::Tensor copy = tensor.clone();
  for (int to = 0; to < transport.size(); ++to) {
    if (to != root) transport.isend(to, tag, {copy});
  }
}

std::vector<Values> gather(Transport& transport, Values values, int root, double timeout) {
  const Tag tag = tag_of(MessageKind::kGather, root);
  std::vector<Values> all;
  if (transport.rank() != root) {
    transport.isend(root, tag, std::move(values));
    return all;
  }
  all.resize(transport.size());
  const double deadline = awake_seconds() + timeout;
  for (int from = 0; from < transport.size(); ++from) {
    all[from] =
        from == root ? std::move(values) : transport.receive(from, tag, std::max(deadline - awake_seconds(), 1e-3));
  }
  return all;
}

void barrier(Transport& transport, double timeout) {
  const Tag tag = tag_of(MessageKind::kBarrier, 0);
  const double deadline = awake_seconds() + timeout;
  for (int to = 0; to < transport.size(); ++to) {
    if (to != transport.rank()) transport.isend(to, tag, {});
  }
  for (int from = 0; from < transport.size(); ++from) {
    if (from != transport.rank()) transport.receive(from, tag, std::max(deadline - awake_seconds(), 1e-3));
  }
}

}  // namespace twobp
