#include "twobp/plan/auto_schedule/timing.h"

#include <algorithm>
#include <limits>

namespace twobp {

OrderTiming::OrderTiming(const PipelineProblem& problem, TaskOrder order) : problem_(problem) {
  const auto tasks = static_cast<size_t>(problem.tasks());
  sender_.resize(tasks);
  receiver_.resize(tasks);
  rank_.resize(tasks);
  delay_.resize(tasks);
  seconds_.resize(tasks);
  fused_.resize(tasks);
  position_.resize(tasks);
  head_.resize(tasks);
  tail_.resize(tasks);
  held_.resize(tasks);
  ran_.resize(tasks);
  at_.resize(static_cast<size_t>(problem.ranks()));
  topological_.reserve(tasks);
  for (int task = 0; task < problem.tasks(); ++task) {
    sender_[task] = problem.sender(task);
    receiver_[task] = problem.receiver(task);
    rank_[task] = problem.rank(task);
    delay_[task] = problem.delay_to(task);
  }
  reset(std::move(order));
}

void OrderTiming::reset(TaskOrder order) {
  order_ = std::move(order);
  for (int rank = 0; rank < problem_.ranks(); ++rank) {
    const auto& list = order_.ranks[rank];
    double held = 0;
    for (size_t i = 0; i < list.size(); ++i) {
      const int task = list[i];
      const bool fused = problem_.op(task) == Op::kBackwardP1 && order_.fused[problem_.slot(task)] != 0;
      fused_[task] = fused ? 1 : 0;
      seconds_[task] = problem_.seconds(task, fused);
      position_[task] = static_cast<int>(i);
      held_[task] = held;
      held += problem_.bytes(task, fused);
    }
  }
}

double OrderTiming::update() {
  topological_.clear();
  std::fill(ran_.begin(), ran_.end(), 0);
  std::fill(at_.begin(), at_.end(), 0);
  for (int rank = problem_.ranks() - 1; rank >= 0; --rank) ready_.push_back(rank);
  size_t total = 0;
  for (const auto& list : order_.ranks) total += list.size();
  makespan_ = 0;
  while (!ready_.empty()) {
    const int rank = ready_.back();
    ready_.pop_back();
    const auto& list = order_.ranks[rank];
    size_t& at = at_[rank];
    double now = at == 0 ? 0 : end_of(list[at - 1]);
    for (; at < list.size(); ++at) {
      const int task = list[at];
      const int from = sender_[task];
      if (from >= 0 && ran_[from] == 0) break;
      head_[task] = from < 0 ? now : std::max(now, end_of(from) + delay_[task]);
      now = head_[task] + seconds_[task];
      ran_[task] = 1;
      topological_.push_back(task);
      // A rank that waits for this message can go on.
      const int to = receiver_[task];
      if (to >= 0) {
        const int other = rank_[to];
        if (at_[other] == static_cast<size_t>(position_[to])) ready_.push_back(other);
      }
    }
    if (at == list.size()) makespan_ = std::max(makespan_, now + problem_.optimizer(rank));
  }
  if (topological_.size() != total) return makespan_ = std::numeric_limits<double>::infinity();
  for (auto it = topological_.rbegin(); it != topological_.rend(); ++it) {
    const int task = *it;
    const auto& list = order_.ranks[rank_[task]];
    const auto next = static_cast<size_t>(position_[task]) + 1;
    const double here = next < list.size() ? seconds_[list[next]] + tail_[list[next]] : problem_.optimizer(rank_[task]);
    tail_[task] = std::max(here, after(task));
  }
  return makespan_;
}

void OrderTiming::move(int rank, int from, int to) {
  auto& list = order_.ranks[rank];
  const auto first = list.begin() + std::min(from, to);
  const auto last = list.begin() + std::max(from, to) + 1;
  double held = held_[*first];
  if (from < to) {
    std::rotate(first, first + 1, last);
  } else {
    std::rotate(first, last - 1, last);
  }
  int index = std::min(from, to);
  for (auto it = first; it != last; ++it, ++index) {
    position_[*it] = index;
    held_[*it] = held;
    held += problem_.bytes(*it, fused(*it));
  }
}

bool OrderTiming::stays_acyclic(int rank, int from, int to) const {
  const auto& list = order_.ranks[rank];
  const int task = list[from];
  if (to > from) {
    // A path from the op's receiver to an op that it moves behind would close a circle. On such a path, the receiver
    // ends before the last of these ops begins.
    const int receiver = receiver_[task];
    return receiver < 0 || end_of(receiver) > head_[list[to]];
  }
  const int sender = sender_[task];
  return sender < 0 || head_[sender] < end_of(list[to]);
}

bool OrderTiming::stays_within_cap(int rank, int from, int to) const {
  if (!problem_.capped(rank)) return true;
  const auto& list = order_.ranks[rank];
  const int task = list[from];
  const double cap = problem_.cap(rank);
  const double bytes = problem_.bytes(task, fused(task));
  const int step = to > from ? 1 : -1;
  for (int at = from + step; at != to + step; at += step) {
    const double held = held_[list[at]] - step * bytes;
    if (held + problem_.peak(list[at], fused(list[at])) > cap) return false;
  }
  // Bytes before it: those before its new place, with (without) the ops that it passed.
  const int passed = list[to];
  const double held = step > 0 ? held_[passed] + problem_.bytes(passed, fused(passed)) - bytes : held_[passed];
  return held + problem_.peak(task, fused(task)) <= cap;
}

double OrderTiming::estimate(int rank, int from, int to) {
  const auto& list = order_.ranks[rank];
  const int low = std::min(from, to);
  const int high = std::max(from, to);
  moved_.clear();
  const int task = list[from];
  if (to < from) moved_.emplace_back(task, 0);
  for (int at = low; at <= high; ++at) {
    if (at != from) moved_.emplace_back(list[at], 0);
  }
  if (to > from) moved_.emplace_back(task, 0);
  double now = low == 0 ? 0 : end_of(list[low - 1]);
  for (auto& [op, head] : moved_) {
    head = std::max(now, arrival(op));
    now = head + seconds_[op];
  }
  const auto next = static_cast<size_t>(high) + 1;
  double tail = next < list.size() ? seconds_[list[next]] + tail_[list[next]] : problem_.optimizer(rank);
  double longest = 0;
  for (auto it = moved_.rbegin(); it != moved_.rend(); ++it) {
    tail = std::max(tail, after(it->first));
    longest = std::max(longest, it->second + seconds_[it->first] + tail);
    tail += seconds_[it->first];
  }
  return longest;
}

void OrderTiming::critical_path(SearchRandom& random, std::vector<int>& path) const {
  path.clear();
  int task = -1;
  size_t ties = 0;
  for (int rank = 0; rank < problem_.ranks(); ++rank) {
    const auto& list = order_.ranks[rank];
    if (!list.empty() && end_of(list.back()) + problem_.optimizer(rank) == makespan_ && random.below(++ties) == 0) {
      task = list.back();
    }
  }
  while (task >= 0) {
    path.push_back(task);
    const int before = position_[task] > 0 ? order_.ranks[rank_[task]][position_[task] - 1] : -1;
    const int from = sender_[task];
    const bool here = before >= 0 && end_of(before) == head_[task];
    const bool there = from >= 0 && arrival(task) == head_[task];
    task = here && (!there || random.below(2) == 0) ? before : there ? from : -1;
  }
  std::reverse(path.begin(), path.end());
}

}  // namespace twobp
