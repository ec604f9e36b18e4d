#include "twobp/transport/collectives.h"

#include <algorithm>
#include <numeric>

#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/transport/message.h"

namespace twobp {
namespace {

// Below this size, whole messages are faster than two rounds of smaller ones.
constexpr int64_t kWholeBytes = 16 << 10;
// Up to so many ranks, each sends to each: one round.
constexpr int kMostEachToEach = 4;
// Of all ranks' tensors together, which rank 0 of a tree receives.
constexpr int64_t kTreeBytes = 1 << 20;
constexpr double kGraceOfLevel = 0.25;  // seconds

// The binary tree of ranks with root 0.
int parent_of(int rank) {
  return (rank - 1) / 2;
}

std::vector<int> children_of(int rank, int ranks) {
  std::vector<int> children;
  for (int child = 2 * rank + 1; child <= 2 * rank + 2 && child < ranks; ++child) children.push_back(child);
  return children;
}

// The ranks at and below this one, in the order in which their values travel.
std::vector<int> tree_of(int rank, int ranks) {
  std::vector<int> all{rank};
  for (const int child : children_of(rank, ranks)) {
    const std::vector<int> below = tree_of(child, ranks);
    all.insert(all.end(), below.begin(), below.end());
  }
  return all;
}

int64_t size_of_tree(int rank, int ranks) {
  int64_t size = 0;
  for (int first = rank, last = rank; first < ranks; first = 2 * first + 1, last = 2 * last + 2) {
    size += std::min(last, ranks - 1) - first + 1;
  }
  return size;
}

int levels_below(int rank, int ranks) {
  int levels = 0;
  while ((rank = 2 * rank + 1) < ranks) ++levels;
  return levels;
}

int levels_above(int rank) {
  int levels = 0;
  for (; rank > 0; rank = parent_of(rank)) ++levels;
  return levels;
}

Tag tag_of(MessageKind kind, int number) {
  return {.micro_batch = number, .kind = kind};
}

// The elements that `rank` sums: [first, first + count).
std::pair<int64_t, int64_t> slice_of(int64_t numel, int ranks, int rank) {
  const int64_t first = numel * rank / ranks;
  return {first, numel * (rank + 1) / ranks - first};
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
  if (grace_ > 0) transport_->receive(from_, tag_of(awaited_, number_), grace_);  // throws
  fail_waiting(transport_->rank(), timeout, tag_of(awaited_, number_), from_);
}

bool SumOfRanks::group_ended(double deadline) {
  if (deadline <= 0) return group_->ready();
  group_->block(std::max(deadline - awake_seconds(), 0.0));
  return true;
}

bool SumOfRanks::take(int from, MessageKind kind, double deadline, const Values& like, Values& into) {
  from_ = from;
  awaited_ = kind;
  const Tag tag = tag_of(kind, number_);
  Values values;
  if (!transport_->try_receive(from, tag, values)) {
    if (deadline <= 0) return false;
    values = transport_->receive(from, tag, std::max(deadline - awake_seconds(), 1e-3) + grace_);
  }
  const int rank = transport_->rank();
  TWOBP_CHECK(values.size() == like.size(), "ranks disagree on what they sum: rank ", from, " sent ", values.size(),
              " tensors, but rank ", rank, " has ", like.size());
  for (size_t i = 0; i < like.size(); ++i) {
    TWOBP_CHECK(values[i].scalar_type() == like[i].scalar_type() && values[i].numel() == like[i].numel(),
                "ranks disagree on what they sum: rank ", from, " sent ", values[i].numel(), " numbers of ",
                toString(values[i].scalar_type()), ", but rank ", rank, " has ", like[i].numel(), " of ",
                toString(like[i].scalar_type()));
    values[i] = values[i].view({-1});
  }
  into = std::move(values);
  return true;
}

bool SumOfRanks::take_parts(double deadline, const Values& mine) {
  for (int from = 0; from < transport_->size(); ++from) {
    if (from == transport_->rank() || !parts_[from].empty()) continue;
    if (!take(from, MessageKind::kPart, deadline, mine, parts_[from])) return false;
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
  flat_ = tensor_.view({-1});
  const auto bytes = static_cast<int64_t>(tensor_.nbytes());
  if (ranks > kMostEachToEach && bytes <= std::min(kWholeBytes, kTreeBytes / ranks)) {
    way_ = Way::kTree;
    return;
  }
  if (ranks <= kMostEachToEach && bytes <= kWholeBytes) way_ = Way::kEachToEach;
  summed_there_.assign(ranks, false);
  summed_there_[rank] = true;
  for (int step = 1; step < ranks; ++step) {
    const int to = (rank + step) % ranks;
    // A slice is overwritten only when its sum has come back, and its owner has read it by then. A whole tensor is
    // overwritten with the sum even if the others have not read it yet, so they get a copy.
    at::Tensor part = part_for(to);
    transport.isend(to, tag_of(MessageKind::kPart, number_), {way_ == Way::kSlices ? part : part.clone()});
  }
}

at::Tensor AllReduce::part_for(int rank) const {
  if (way_ == Way::kEachToEach) return flat_;
  const auto [first, count] = slice_of(flat_.numel(), transport_->size(), rank);
  return flat_.narrow(0, first, count);
}

bool AllReduce::advance_in_tree(double deadline) {
  const int ranks = transport_->size();
  const int rank = transport_->rank();
  const std::vector<int> children = children_of(rank, ranks);
  if (!added_) {
    for (const int child : children) {
      if (!parts_[child].empty()) continue;
      grace_ = kGraceOfLevel * levels_below(child, ranks);
      const at::Tensor like = flat_.expand({size_of_tree(child, ranks), flat_.numel()});
      if (!take(child, MessageKind::kPart, deadline, {like}, parts_[child])) return false;
    }
    std::vector<at::Tensor> all{flat_};
    for (const int child : children) all.push_back(parts_[child][0]);
    parts_ = {{at::cat(all)}};
    if (rank > 0) transport_->isend(parent_of(rank), tag_of(MessageKind::kPart, number_), parts_[0]);
    added_ = true;
  }
  Values sum;
  if (rank == 0) {
    const std::vector<at::Tensor> rows = parts_[0][0].view({ranks, -1}).unbind(0);
    const std::vector<int> order = tree_of(0, ranks);
    std::vector<Values> by_rank(ranks);
    for (int i = 0; i < ranks; ++i) by_rank[order[i]] = {rows[i]};
    sum = {sum_of(by_rank, 0)};
  } else {
    grace_ = kGraceOfLevel * (levels_below(0, ranks) + levels_above(rank));
    if (!take(parent_of(rank), MessageKind::kSum, deadline, {flat_}, sum)) return false;
  }
  for (const int child : children) transport_->isend(child, tag_of(MessageKind::kSum, number_), sum);
  flat_.copy_(sum[0]);
  return true;
}

bool AllReduce::advance(double deadline) {
  if (group_) return group_ended(deadline);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (way_ == Way::kTree) return advance_in_tree(deadline);
  const int ranks = transport_->size();
  const int rank = transport_->rank();
  at::Tensor mine = part_for(rank);
  if (!added_) {
    if (!take_parts(deadline, {mine})) return false;
    const at::Tensor sum = sum_of(parts_, 0);
    mine.copy_(sum);
    parts_.assign(ranks, {});
    added_ = true;
    if (way_ == Way::kEachToEach) return true;
    for (int step = 1; step < ranks; ++step) {
      transport_->isend((rank + step) % ranks, tag_of(MessageKind::kSum, number_), {sum});
    }
  }
  for (int from = 0; from < ranks; ++from) {
    if (summed_there_[from]) continue;
    Values sum;
    at::Tensor part = part_for(from);
    if (!take(from, MessageKind::kSum, deadline, {part}, sum)) return false;
    part.copy_(sum[0]);
    summed_there_[from] = true;
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
  const int ranks = transport.size();
  const int place = (transport.rank() - root + ranks) % ranks;  // in the tree, whose root is `root`
  const auto rank_at = [&](int other) { return (other + root) % ranks; };
  const at::Tensor sent =
      place == 0
          ? tensor.clone()
          : transport.receive(rank_at(parent_of(place)), tag, timeout + kGraceOfLevel * levels_above(parent_of(place)))
                .at(0);
  for (const int child : children_of(place, ranks)) transport.isend(rank_at(child), tag, {sent});
  if (place > 0) tensor = sent.clone();
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
