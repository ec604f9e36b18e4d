#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/plan/auto_schedule/problem.h"

namespace twobp {
namespace {

class Greedy {
 public:
  Greedy(const PipelineProblem& problem, const GreedyRule& rule)
      : problem_(problem),
        rule_(rule),
        random_(rule.seed),
        arrival_(static_cast<size_t>(2) * problem.stages() * problem.units(), kInfinity),
        next_(static_cast<size_t>(3) * problem.stages(), 0),
        now_(static_cast<size_t>(problem.ranks()), 0),
        held_(static_cast<size_t>(problem.ranks()), 0),
        stashed_(static_cast<size_t>(problem.ranks()), 0),
        in_flight_(static_cast<size_t>(problem.ranks()), problem.units()),
        unfinished_(static_cast<size_t>(problem.ranks()), problem.units()) {
    order_.ranks.resize(problem.ranks());
    order_.fused.assign(static_cast<size_t>(problem.stages()) * problem.units(), 0);
    for (int rank = 0; rank < problem.ranks(); ++rank) {
      order_.ranks[rank].reserve(3 * problem.stages_of_rank(rank).size() * problem.units());
    }
    for (int unit = 0; unit < problem.units(); ++unit) arrival(Op::kForward, 0, unit) = 0;
    set_tails();
    set_limits();
  }

  TaskOrder run() {
    // Ranks act in the order of time, so arrivals before a decision are known by then.
    std::vector<double> due(static_cast<size_t>(problem_.ranks()), kInfinity);
    std::priority_queue<std::pair<double, int>, std::vector<std::pair<double, int>>, std::greater<>> events;
    const auto set_due = [&](int rank, double at) {
      if (at == due[rank]) return;
      due[rank] = at;
      if (at < kInfinity) events.emplace(at, rank);
    };
    for (int rank = 0; rank < problem_.ranks(); ++rank) set_due(rank, next_event(rank));
    while (!events.empty()) {
      const auto [at, rank] = events.top();
      events.pop();
      if (at != due[rank]) continue;  // its time has changed since
      now_[rank] = at;
      touched_ = -1;
      act(rank);
      due[rank] = kInfinity;
      set_due(rank, next_event(rank));
      if (touched_ >= 0) set_due(touched_, next_event(touched_));
    }
    if (!std::all_of(next_.begin(), next_.end(), [&](int n) { return n == problem_.units(); })) return {};
    return std::move(order_);
  }

 private:
  double& arrival(Op op, int stage, int place) {
    return arrival_[(static_cast<size_t>(op) * problem_.stages() + stage) * problem_.units() + place];
  }
  int& next(Op op, int stage) { return next_[static_cast<size_t>(op) * problem_.stages() + stage]; }
  bool done(Op op, int stage) { return next(op, stage) == problem_.units(); }
  int next_task(Op op, int stage) { return problem_.task(op, stage, next(op, stage)); }
  bool w_pending(int stage) { return next(Op::kBackwardP2, stage) < next(Op::kBackwardP1, stage); }
  bool w_pending_on(int rank) {
    const auto& stages = problem_.stages_of_rank(rank);
    return std::any_of(stages.begin(), stages.end(), [&](int s) { return w_pending(s); });
  }

  // Computes the longest way to the end: from the last micro-batch to the first, its I and W before its F.
  void set_tails() {
    tail_.assign(static_cast<size_t>(problem_.tasks()), 0);
    const int slices = problem_.slices();
    for (int begin = problem_.units() - slices; begin >= 0; begin -= slices) {
      for (int place = begin + slices - 1; place >= begin; --place) set_backward_tails(place);
      for (int place = begin + slices - 1; place >= begin; --place) set_forward_tails(place);
    }
  }
  void set_backward_tails(int place) {
    for (int s = 0; s < problem_.stages(); ++s) {
      const int w = begin_tail(Op::kBackwardP2, s, place);
      const int i = begin_tail(Op::kBackwardP1, s, place);
      follow(i, w, 0);
      if (s > 0) follow(i, problem_.task(Op::kBackwardP1, s - 1, place), delay(i));
    }
  }
  void set_forward_tails(int unit) {
    for (int s = problem_.stages() - 1; s >= 0; --s) {
      const int f = begin_tail(Op::kForward, s, unit);
      follow(f, problem_.task(Op::kBackwardP1, s, problem_.unit_at(Op::kBackwardP1, unit)), 0);
      if (s + 1 < problem_.stages()) follow(f, problem_.task(Op::kForward, s + 1, unit), delay(f));
    }
  }
  int begin_tail(Op op, int stage, int place) {
    const int task = problem_.task(op, stage, place);
    tail_[task] = problem_.optimizer(problem_.rank(task));
    if (place + 1 < problem_.units()) follow(task, task + 1, 0);
    return task;
  }
  void follow(int task, int successor, double delay) {
    tail_[task] = std::max(tail_[task], delay + problem_.seconds(successor, false) + tail_[successor]);
  }
  double delay(int task) const {
    const int to = problem_.receiver(task);
    return to < 0 ? 0 : problem_.delay_to(to);
  }

  void set_limits() {
    double round = 0;
    for (int rank = 0; rank < problem_.ranks(); ++rank) {
      double sum = 0;
      for (const int s : problem_.stages_of_rank(rank)) sum += work(s);
      round = std::max(round, sum);
    }
    for (int rank = 0; rank < problem_.ranks() && round > 0; ++rank) {
      const int first = problem_.stages_of_rank(rank).front();
      double way = 0;
      for (int s = first; s < problem_.stages(); ++s) {
        const int f = problem_.task(Op::kForward, s, 0);
        const int i = problem_.task(Op::kBackwardP1, s, 0);
        way += problem_.mean_seconds(Op::kForward, s) + problem_.mean_seconds(Op::kBackwardP1, s);
        if (s > first) way += problem_.delay_to(f) + delay(i);
      }
      // All slices of a micro-batch have gone forward before its first I.
      const auto limit = [&](double factor) {
        const int units = std::max(1, static_cast<int>(std::ceil(factor * way / round - 1e-9)));
        return factor > 0 ? units + problem_.slices() - 1 : problem_.units();
      };
      in_flight_[rank] = limit(rule_.in_flight);
      unfinished_[rank] = limit(rule_.unfinished);
    }
  }
  double work(int s) const {
    return problem_.mean_seconds(Op::kForward, s) + problem_.mean_seconds(Op::kBackwardP1, s) +
           problem_.mean_seconds(Op::kBackwardP2, s);
  }
  // Whether the rank's limits admit this F. `room`: as if all pending W had run.
  bool admits(int stage, bool room) {
    const int rank = problem_.rank_of_stage()[stage];
    const auto& stages = problem_.stages_of_rank(rank);
    const int m = next(Op::kForward, stage);
    if (stage == stages.front()) {
      if (m - next(Op::kBackwardP1, stage) >= in_flight_[rank]) return false;
      if (!room && m - next(Op::kBackwardP2, stage) >= unfinished_[rank] && w_pending_on(rank)) return false;
    }
    if (!problem_.capped(rank)) return true;
    const int task = problem_.task(Op::kForward, stage, m);
    const double free = problem_.cap(rank) - held_[rank] + (room ? stashed_[rank] : 0);
    return problem_.peak(task, false) <= free && can_finish(rank, task);
  }
  // Whether the rank can run this I, at the latest as B when no W is pending. Only an I that adds bytes for
  // earlier slices may have to wait for others.
  bool admits_p1(int stage) {
    const int rank = problem_.rank_of_stage()[stage];
    const int task = next_task(Op::kBackwardP1, stage);
    const double more = problem_.bytes(task, true);
    if (more <= 0 || !problem_.capped(rank)) return true;
    return held_[rank] - stashed_[rank] + more <= problem_.cap(rank) && can_finish(rank, task);
  }

  // Whether the micro-batches under way can still be finished after `first`, an F or an I: the oldest first,
  // each freeing its bytes. Pending W can run, and B leaves none.
  bool can_finish(int rank, int first) {
    const auto& stages = problem_.stages_of_rank(rank);
    if (stages.size() == 1 && problem_.slices() == 1) return true;
    const int slices = problem_.slices();
    const int of = problem_.stage(first);
    const auto through = [&](Op op, int s) { return next(op, s) + (s == of && op == problem_.op(first) ? 1 : 0); };
    double free = problem_.cap(rank) - (held_[rank] - stashed_[rank]) - problem_.bytes(first, true);
    const int begun = through(Op::kForward, stages.front());
    for (int begin = through(Op::kBackwardP1, stages.front()) / slices * slices; begin < begun; begin += slices) {
      double change = 0;
      double most = 0;
      const auto run = [&](int task) {
        most = std::max(most, change + problem_.peak(task, true));
        change += problem_.bytes(task, true);
      };
      for (const int s : stages) {
        for (int unit = std::max(begin, through(Op::kForward, s)); unit < begin + slices; ++unit)
          run(problem_.task(Op::kForward, s, unit));
      }
      for (auto s = stages.rbegin(); s != stages.rend(); ++s) {
        for (int place = std::max(begin, through(Op::kBackwardP1, *s)); place < begin + slices; ++place)
          run(problem_.task(Op::kBackwardP1, *s, place));
      }
      if (most > free) return false;
      free -= change;
    }
    return true;
  }

  // The next time when this rank can do something.
  double next_event(int rank) {
    if (w_pending_on(rank)) return now_[rank];
    return std::max(now_[rank], next_arrival(rank, true));
  }
  double next_arrival(int rank, bool room) {
    double first = kInfinity;
    for (const int s : problem_.stages_of_rank(rank)) {
      if (!done(Op::kForward, s)) {
        const double at = arrival(Op::kForward, s, next(Op::kForward, s));
        if (at < first && admits(s, room)) first = at;
      }
      if (done(Op::kBackwardP1, s)) continue;
      const double at = arrival(Op::kBackwardP1, s, next(Op::kBackwardP1, s));
      if (at < first && admits_p1(s)) first = at;
    }
    return first;
  }

  struct Choice {
    int task = -1;
    bool fused = false;
    double score = -kInfinity;
  };

  void act(int rank) {
    Choice best;
    const auto consider = [&](int task, bool fused, double score) {
      if (rule_.noise > 0) score += rule_.noise * tail_[task] * random_.unit();
      if (score > best.score) best = {task, fused, score};
    };
    const double tail_range = 4 * (tail_[0] + 1);  // the first F has the longest
    bool blocked = false;                          // an op is ready, but needs room that W would make
    for (const int s : problem_.stages_of_rank(rank)) {
      if (!done(Op::kForward, s) && arrival(Op::kForward, s, next(Op::kForward, s)) <= now_[rank]) {
        const int task = next_task(Op::kForward, s);
        const double by_stage = static_cast<double>(rule_.deepest_forward ? s : -s) / problem_.stages();
        if (admits(s, false)) {
          consider(task, false,
                   rule_.prefer == GreedyRule::Prefer::kLongestTail
                       ? tail_[task]
                       : by_stage + (rule_.prefer == GreedyRule::Prefer::kForward ? tail_range : 0));
        } else if (admits(s, true)) {
          blocked = true;
        }
      }
      if (!done(Op::kBackwardP1, s) && arrival(Op::kBackwardP1, s, next(Op::kBackwardP1, s)) <= now_[rank] &&
          admits_p1(s)) {
        const int task = next_task(Op::kBackwardP1, s);
        const bool fits = held_[rank] + problem_.peak(task, false) <= problem_.cap(rank);
        if (!fits && w_pending_on(rank)) {
          blocked = true;
          continue;
        }
        const bool fuse = !fits || (rule_.fuse > 0 && problem_.capped(rank) && problem_.bytes(task, false) > 0 &&
                                    !w_pending(s) && random_.unit() < rule_.fuse);
        const bool backward_first = rule_.prefer == GreedyRule::Prefer::kBackward;
        consider(task, fuse,
                 rule_.prefer == GreedyRule::Prefer::kLongestTail
                     ? tail_[task]
                     : tail_[task] / (tail_[0] + 1) + (backward_first ? tail_range : 0));
      }
    }
    if (best.task >= 0) return start(rank, best.task, best.fused);
    const int w = oldest_w(rank);
    TWOBP_CHECK(w >= 0, "list scheduling woke rank ", rank, " with nothing to run");
    const double ahead = next_arrival(rank, false);
    const bool worth = rule_.w_fits <= 0 || now_[rank] + rule_.w_fits * problem_.seconds(w, false) <= ahead;
    if (blocked || worth || ahead <= now_[rank]) return start(rank, w, false);
    now_[rank] = ahead;
  }

  // W of the earliest place; among equals, that of the later stage.
  int oldest_w(int rank) {
    int best = -1;
    for (const int s : problem_.stages_of_rank(rank)) {
      if (!w_pending(s)) continue;
      const int task = next_task(Op::kBackwardP2, s);
      if (best < 0 || problem_.place(task) <= problem_.place(best)) best = task;
    }
    return best;
  }

  void start(int rank, int task, bool fused) {
    const Op op = problem_.op(task);
    const int stage = problem_.stage(task);
    const int place = problem_.place(task);
    order_.ranks[rank].push_back(task);
    now_[rank] += problem_.seconds(task, fused);
    held_[rank] += problem_.bytes(task, fused);
    const double stash = problem_.cost(stage, problem_.unit(task)).stash_bytes;
    if (op != Op::kForward && !fused) stashed_[rank] += op == Op::kBackwardP1 ? stash : -stash;
    ++next(op, stage);
    if (fused) {
      order_.fused[problem_.slot(task)] = 1;
      ++next(Op::kBackwardP2, stage);
    }
    const double end = now_[rank];
    const auto arrives = [&](Op to, int at, int in_place) {
      arrival(to, at, in_place) =
          end + (problem_.rank_of_stage()[at] == rank ? 0 : problem_.delay_to(problem_.task(to, at, in_place)));
      touched_ = problem_.rank_of_stage()[at];
    };
    if (op == Op::kForward) {
      if (stage + 1 < problem_.stages()) {
        arrives(Op::kForward, stage + 1, place);
      } else {
        arrives(Op::kBackwardP1, stage, problem_.unit_at(Op::kBackwardP1, place));
      }
    } else if (op == Op::kBackwardP1 && stage > 0) {
      arrives(Op::kBackwardP1, stage - 1, place);
    }
  }

  const PipelineProblem& problem_;
  const GreedyRule& rule_;
  SearchRandom random_;
  std::vector<double> arrival_;  // of the inputs of F and of I
  std::vector<int> next_;        // by op and stage: the place that is next
  std::vector<double> now_;
  std::vector<double> held_;
  std::vector<double> stashed_;  // the part of held_ that waits for W
  std::vector<int> in_flight_;
  std::vector<int> unfinished_;
  std::vector<double> tail_;
  int touched_ = -1;
  TaskOrder order_;
};

}  // namespace

std::vector<GreedyRule> greedy_rules(int count, uint64_t seed) {
  std::vector<GreedyRule> rules;
  using Prefer = GreedyRule::Prefer;
  for (const double in_flight : {1.0, 0.0, 1.5, 0.75, 2.5}) {
    for (const Prefer prefer : {Prefer::kBackward, Prefer::kLongestTail, Prefer::kForward}) {
      for (const double w_fits : {0.0, 1.0, 0.5}) {
        for (const bool deepest : {true, false}) {
          rules.push_back({prefer, deepest, in_flight, 0, w_fits, 0, 0, 0});
          if (in_flight > 0 && prefer == Prefer::kBackward && deepest && w_fits == 0) {
            rules.push_back({prefer, deepest, in_flight, 1.2 * in_flight, w_fits, 0, 0, 0});
          }
        }
      }
    }
  }
  const size_t fixed = rules.size();
  SearchRandom random(seed);
  while (static_cast<int>(rules.size()) < count) {
    GreedyRule rule = rules[random.below(fixed)];
    rule.in_flight = random.below(4) == 0 ? 0 : 0.5 + 2 * random.unit();
    rule.unfinished = random.below(2) == 0 ? 0 : 0.5 + 3 * random.unit();
    rule.w_fits = random.below(3) == 0 ? 0 : random.unit();
    rule.noise = 0.3 * random.unit();
    rule.fuse = random.below(2) == 0 ? 0 : random.unit();
    rule.seed = random.next();
    rules.push_back(rule);
  }
  rules.resize(std::max(1, count));
  return rules;
}

TaskOrder greedy_order(const PipelineProblem& problem, const GreedyRule& rule) {
  return Greedy(problem, rule).run();
}

}  // namespace twobp
