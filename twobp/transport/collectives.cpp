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
constexpr int kBarrierNumber = -1;

// The binary tree of places with root 0.
int parent_of(int place) {
  return (place - 1) / 2;
}

std::vector<int> children_of(int place, int ranks) {
  std::vector<int> children;
  for (int child = 2 * place + 1; child <= 2 * place + 2 && child < ranks; ++child) children.push_back(child);
  return children;
}

// The places at and below this one, in the order in which their values are joined.
std::vector<int> tree_of(int place, int ranks) {
  std::vector<int> all{place};
  for (const int child : children_of(place, ranks)) {
    const std::vector<int> below = tree_of(child, ranks);
    all.insert(all.end(), below.begin(), below.end());
  }
  return all;
}

int levels_below(int place, int ranks) {
  int levels = 0;
  while ((place = 2 * place + 1) < ranks) ++levels;
  return levels;
}

int levels_above(int place) {
  int levels = 0;
  for (; place > 0; place = parent_of(place)) ++levels;
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
  if (instead_) instead_->fail(timeout);
  MessageWait missing(*transport_, from_, tag_of(awaited_, number_));
  if (grace_ > 0) missing.block(grace_);  // throws what a rank says that knows better
  missing.fail(timeout);
}

bool SumOfRanks::instead_ended(double deadline) {
  if (deadline > 0) instead_->block(std::max(deadline - awake_seconds(), 1e-3));
  return instead_->ready();
}

bool SumOfRanks::take(int from, MessageKind kind, double deadline, Values& into) {
  from_ = from;
  awaited_ = kind;
  const Tag tag = tag_of(kind, number_);
  if (transport_->try_receive(from, tag, into)) return true;
  if (deadline <= 0) return false;
  MessageWait message(*transport_, from, tag);
  message.block(std::max(deadline - awake_seconds(), 1e-3) + grace_);
  if (!message.ready()) {
    grace_ = 0;  // it is over
    return false;
  }
  into = std::move(message.values);
  return true;
}

bool SumOfRanks::take(int from, MessageKind kind, double deadline, const Values& like, Values& into) {
  Values values;
  if (!take(from, kind, deadline, values)) return false;
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

Exchange::Exchange(Transport& transport, at::Tensor numbers, int number, WaitCause cause, Adds adds, Values notes,
                   std::vector<int> order)
    : SumOfRanks(transport, number, cause), adds_(adds), order_(std::move(order)), joined_(notes.size()) {
  TWOBP_CHECK(numbers.is_contiguous(), "a sum over ranks needs a dense tensor");
  const at::AutoDispatchBelowADInplaceOrView below_autograd;  // views need no autograd graph
  numbers_ = numbers.view({-1});
  if (order_.empty()) {
    order_.resize(transport.size());
    std::iota(order_.begin(), order_.end(), 0);
  }
  place_ = static_cast<int>(std::find(order_.begin(), order_.end(), transport.rank()) - order_.begin());
  sum_ = adds == Adds::kOnTheWay ? numbers_.clone() : numbers_;
  for (size_t i = 0; i < notes.size(); ++i) {
    lengths_.push_back(notes[i].numel());
    joined_[i] = {notes[i].view({-1})};
  }
}

void Exchange::join(const Values& part, int from) {
  TWOBP_CHECK(part.size() == 1 + (joined_.empty() ? 0 : 1 + joined_.size()) && part[0].dim() == 1 &&
                  part[0].scalar_type() == numbers_.scalar_type() &&
                  (adds_ == Adds::kInRankOrder || part[0].numel() == numbers_.numel()),
              "ranks disagree on what they sum: rank ", transport_->named(from), " sent ", part.size(),
              " tensors, the first of ", part.empty() ? 0 : part[0].numel(), " numbers of ",
              part.empty() ? "no type" : toString(part[0].scalar_type()), ", but rank ",
              transport_->named(transport_->rank()), " has ", numbers_.numel(), " of ",
              toString(numbers_.scalar_type()));
  if (adds_ == Adds::kOnTheWay) {
    sum_.add_(part[0]);
  } else {
    sum_ = at::cat({sum_, part[0]});
  }
  if (joined_.empty()) return;
  const int64_t* const lengths = part[1].const_data_ptr<int64_t>();
  lengths_.insert(lengths_.end(), lengths, lengths + part[1].numel());
  for (size_t i = 0; i < joined_.size(); ++i) joined_[i].push_back(part[2 + i]);
}

bool Exchange::go_up(double deadline) {
  const int ranks = transport_->size();
  const std::vector<int> children = children_of(place_, ranks);
  for (; children_ < children.size(); ++children_) {
    grace_ = kGraceOfLevel * levels_below(children[children_], ranks);
    const int from = order_[children[children_]];
    Values part;
    if (!take(from, MessageKind::kPart, deadline, part)) return false;
    join(part, from);
  }
  if (place_ == 0) return true;
  Values up{sum_};
  if (!joined_.empty()) {
    up.push_back(at::tensor(lengths_, at::kLong));
    for (const Values& parts : joined_) up.push_back(at::cat(parts));
  }
  transport_->isend(order_[parent_of(place_)], tag_of(MessageKind::kPart, number_), std::move(up));
  return true;
}

// The ranks were joined in the tree's order.
void Exchange::read_notes() {
  const int ranks = transport_->size();
  notes_of_.resize(ranks);
  const std::vector<int> places = tree_of(0, ranks);
  TWOBP_CHECK(lengths_.size() == places.size() * joined_.size(),
              "ranks disagree on what they exchange: ", lengths_.size(), " notes came of ", ranks, " ranks");
  for (size_t note = 0; note < joined_.size(); ++note) {
    const at::Tensor all = at::cat(joined_[note]);
    int64_t begin = 0;
    for (size_t i = 0; i < places.size(); ++i) {
      const int64_t length = lengths_[i * joined_.size() + note];
      TWOBP_CHECK(length >= 0 && length <= all.numel() - begin, "a note of rank ", transport_->named(order_[places[i]]),
                  " is cut off");
      notes_of_[order_[places[i]]].push_back(all.narrow(0, begin, length));
      begin += length;
    }
  }
}

bool Exchange::advance(double deadline) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (!went_up_) went_up_ = go_up(deadline);
  if (!went_up_) return false;
  const int ranks = transport_->size();
  Values sum;
  if (place_ > 0) {
    grace_ = kGraceOfLevel * (levels_below(0, ranks) + levels_above(place_));
    if (!take(order_[parent_of(place_)], MessageKind::kSum, deadline, {numbers_}, sum)) return false;
  } else {
    if (!joined_.empty()) read_notes();
    sum = {sum_};
    if (adds_ == Adds::kInRankOrder && ranks > 1) {
      TWOBP_CHECK(sum_.numel() == ranks * numbers_.numel(), "ranks disagree on what they sum: ", sum_.numel(),
                  " numbers came of ", ranks, " ranks, but rank ", transport_->named(transport_->rank()), " has ",
                  numbers_.numel());
      const std::vector<at::Tensor> rows = sum_.view({ranks, -1}).unbind(0);
      const std::vector<int> places = tree_of(0, ranks);
      std::vector<Values> by_rank(ranks);
      for (int i = 0; i < ranks; ++i) by_rank[order_[places[i]]] = {rows[i]};
      sum = {sum_of(by_rank, 0)};
    }
  }
  for (const int child : children_of(place_, ranks))
    transport_->isend(order_[child], tag_of(MessageKind::kSum, number_), sum);
  numbers_.copy_(sum[0]);
  return true;
}

void SumBySlices::expect_sums() {
  summed_there_.assign(transport_->size(), false);
  summed_there_[transport_->rank()] = true;
}

void SumBySlices::send_sum(const at::Tensor& sum) {
  const int ranks = transport_->size();
  for (int step = 1; step < ranks; ++step) {
    transport_->isend((transport_->rank() + step) % ranks, tag_of(MessageKind::kSum, number_), {sum});
  }
}

bool SumBySlices::take_sums(double deadline) {
  for (int from = 0; from < transport_->size(); ++from) {
    if (summed_there_[from]) continue;
    Values sum;
    at::Tensor part = sum_for(from);
    if (!take(from, MessageKind::kSum, deadline, {part}, sum)) return false;
    part.copy_(sum[0]);
    summed_there_[from] = true;
  }
  return true;
}

AllReduce::AllReduce(Transport& transport, at::Tensor tensor, int number, WaitCause cause)
    : SumBySlices(transport, number, cause) {
  TWOBP_CHECK(tensor.is_contiguous(), "a sum over ranks needs a dense tensor");
  const int ranks = transport.size();
  const int rank = transport.rank();
  if (ranks == 1 || tensor.numel() == 0) {
    done_ = true;
    return;
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;  // views need no autograd graph
  if (GroupSums* const sums = group_sums_for(transport, tensor)) {
    instead_ = std::make_unique<GroupSum>(*sums, sums->all_reduce(tensor));
    return;
  }
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  if (ranks > kMostEachToEach && bytes <= std::min(kWholeBytes, kTreeBytes / ranks)) {
    instead_ = std::make_unique<Exchange>(transport, std::move(tensor), number, cause, Exchange::Adds::kInRankOrder);
    return;
  }
  flat_ = tensor.view({-1});
  whole_ = ranks <= kMostEachToEach && bytes <= kWholeBytes;
  expect_sums();
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
  if (instead_) return instead_ended(deadline);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (!added_) {
    at::Tensor mine = part_for(transport_->rank());
    if (!take_parts(deadline, {mine})) return false;
    const at::Tensor sum = sum_of(parts_, 0);
    mine.copy_(sum);
    parts_.assign(transport_->size(), {});
    added_ = true;
    if (whole_) return true;
    send_sum(sum);
  }
  return take_sums(deadline);
}

AllReduceOfTerms::AllReduceOfTerms(Transport& transport, const at::Tensor& terms, int number)
    : SumBySlices(transport, number, WaitCause::kGradients), terms_(terms.flatten(1)) {
  TWOBP_CHECK(terms.is_contiguous(), "a sum over ranks needs a dense tensor");
  expect_sums();
  for (int step = 1; step < transport.size(); ++step) {
    const int to = (transport.rank() + step) % transport.size();
    transport.isend(to, tag_of(MessageKind::kPart, number_), {part_for(to).contiguous()});
  }
}

at::Tensor AllReduceOfTerms::part_for(int rank) const {
  const auto [first, count] = slice_of(terms_.size(1), transport_->size(), rank);
  return terms_.narrow(1, first, count);
}

bool AllReduceOfTerms::advance(double deadline) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (!added_) {
    const at::Tensor mine = part_for(transport_->rank());
    if (!take_parts(deadline, {mine})) return false;
    const bool alone = transport_->size() == 1;
    at::Tensor sum = alone ? mine[0] : at::Tensor();
    for (const Values& part : parts_) {
      const at::Tensor terms = part[0].view(mine.sizes());
      for (int64_t term = alone ? 1 : 0; term < terms.size(0); ++term)
        sum = sum.defined() ? sum.add_(terms[term]) : terms[term].clone();
    }
    if (!alone) mine[0].copy_(sum);
    parts_.assign(transport_->size(), {});
    added_ = true;
    send_sum(sum);
  }
  return take_sums(deadline);
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
    instead_ = std::make_unique<GroupSum>(*sums, sums->reduce(tensors, owners));
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
  if (instead_) return instead_ended(deadline);
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

void sum_on_the_way(Transport& transport, const at::Tensor& numbers, const Patience& patience, WaitCause cause) {
  Exchange sum(transport, numbers, 0, cause);
  wait_for(sum, patience);
}

namespace {

Values receive(Transport& transport, int from, const Tag& tag, const Patience& patience) {
  MessageWait message(transport, from, tag);
  wait_for(message, patience);
  return std::move(message.values);
}

}  // namespace

void broadcast(Transport& transport, at::Tensor& tensor, int root, const Patience& patience) {
  const Tag tag = tag_of(MessageKind::kBroadcast, root);
  const int ranks = transport.size();
  const int place = (transport.rank() - root + ranks) % ranks;  // in the tree, whose root is `root`
  const auto rank_at = [&](int other) { return (other + root) % ranks; };
  Patience longer = patience;
  if (place > 0) longer.timeout += kGraceOfLevel * levels_above(parent_of(place));
  const at::Tensor sent =
      place == 0 ? tensor.clone() : receive(transport, rank_at(parent_of(place)), tag, longer).at(0);
  for (const int child : children_of(place, ranks)) transport.isend(rank_at(child), tag, {sent});
  if (place > 0) tensor = sent.clone();
}

std::vector<Values> gather(Transport& transport, Values values, int root, const Patience& patience) {
  const Tag tag = tag_of(MessageKind::kGather, root);
  std::vector<Values> all;
  if (transport.rank() != root) {
    transport.isend(root, tag, std::move(values));
    return all;
  }
  all.resize(transport.size());
  const double deadline = awake_seconds() + patience.timeout;
  for (int from = 0; from < transport.size(); ++from) {
    all[from] = from == root
                    ? std::move(values)
                    : receive(transport, from, tag, {std::max(deadline - awake_seconds(), 1e-3), patience.waits});
  }
  return all;
}

// As an Exchange, but without a tensor.
void barrier(Transport& transport, const Patience& patience) {
  const Tag up = tag_of(MessageKind::kPart, kBarrierNumber);
  const Tag down = tag_of(MessageKind::kSum, kBarrierNumber);
  const int ranks = transport.size();
  const int rank = transport.rank();
  const double deadline = awake_seconds() + patience.timeout;
  const auto wait = [&](int from, const Tag& tag, int levels) {
    const double left = std::max(deadline - awake_seconds(), 1e-3);
    receive(transport, from, tag, {left + kGraceOfLevel * levels, patience.waits});
  };
  for (const int child : children_of(rank, ranks)) wait(child, up, levels_below(child, ranks));
  if (rank > 0) {
    transport.isend(parent_of(rank), up, {});
    wait(parent_of(rank), down, levels_below(0, ranks) + levels_above(rank));
  }
  for (const int child : children_of(rank, ranks)) transport.isend(child, down, {});
}

}  // namespace twobp
