#include <algorithm>
#include <utility>
#include <vector>

#include "twobp/core/text.h"
#include "twobp/plan/auto_schedule/problem.h"
#include "twobp/plan/auto_schedule/timing.h"

namespace twobp {
namespace {

constexpr size_t kTabuSlots = 1U << 16U;
constexpr int kLongestMove = 64;  // ops that one move may pass
constexpr int kMovesPerBlock = 24;

// Moves an op of `rank` from position `from` to position `to`. The ops between them shift by one.
struct Move {
  int rank = 0;
  int from = 0;
  int to = 0;
};

class Search {
 public:
  Search(const PipelineProblem& problem, TaskOrder order, uint64_t seed)
      : problem_(problem), timing_(problem, std::move(order)), random_(seed), tabu_(kTabuSlots, 0) {
    for (int stage = 0; stage < problem.stages(); ++stage) {
      bool bigger = false;
      for (int slice = 0; slice < problem.slices(); ++slice)
        bigger |= problem.bytes(problem.task(Op::kBackwardP1, stage, slice), false) > 0;
      if (bigger && problem.capped(problem.rank_of_stage()[stage])) fusible_.push_back(stage);
    }
  }

  SearchResult run(long iterations, double good_enough) {
    SearchResult best{timing_.order(), timing_.update(), 0};
    long last_better = 0;
    int stuck = 0;
    const long patience = std::max(200L, std::min(2000L, iterations / 8));
    for (long i = 1; i <= iterations && best.seconds > good_enough; ++i) {
      best.iterations = i;
      if (!step(i,
                best.seconds)) {  // no move: the critical path is one block, or caps block all
        if (++stuck > 20) break;
        restart(best.order);
        continue;
      }
      stuck = 0;
      if (timing_.makespan() < best.seconds * (1 - 1e-12)) {
        best.order = timing_.order();
        best.seconds = timing_.makespan();
        last_better = i;
      } else if (i - last_better > patience) {
        restart(best.order);
        last_better = i;
      }
    }
    return best;
  }

 private:
  // Makes one move: by estimate the best that is not tabu, or that promises a new best.
  bool step(long now, double best) {
    moves_.clear();
    find_moves();
    if (moves_.empty()) return false;
    Move chosen;
    double chosen_estimate = kInfinity;
    Move any;
    double any_estimate = kInfinity;
    size_t ties = 0;
    for (const Move& move : moves_) {
      const double estimate = timing_.estimate(move.rank, move.from, move.to);
      if (estimate < any_estimate) {
        any_estimate = estimate;
        any = move;
      }
      if (is_tabu(move, now) && estimate >= best * (1 - 1e-12)) continue;
      if (estimate < chosen_estimate) {
        chosen_estimate = estimate;
        chosen = move;
        ties = 1;
      } else if (estimate == chosen_estimate && random_.below(++ties) == 0) {
        chosen = move;
      }
    }
    if (chosen_estimate == kInfinity) chosen = random_.below(2) == 0 ? any : moves_[random_.below(moves_.size())];
    apply(chosen, now);
    return true;
  }

  void apply(const Move& move, long now) {
    // A pair that was reversed must not be reversed back for a while.
    const auto& list = timing_.order().ranks[move.rank];
    const int task = list[move.from];
    const int step = move.to > move.from ? 1 : -1;
    const long until = now + 6 + static_cast<long>(random_.below(10 + static_cast<size_t>(problem_.ranks())));
    for (int at = move.from + step; at != move.to + step; at += step) {
      tabu_[step > 0 ? key(task, list[at]) : key(list[at], task)] = until;
    }
    timing_.move(move.rank, move.from, move.to);
    timing_.update();
  }

  // The index of "a before b" in the tabu list.
  size_t key(int a, int b) const {
    const uint64_t pair = static_cast<uint64_t>(a) * static_cast<uint64_t>(problem_.tasks()) + static_cast<uint64_t>(b);
    return static_cast<size_t>((pair * 0x9E3779B97F4A7C15ULL) >> 48U) % kTabuSlots;
  }
  bool is_tabu(const Move& move, long now) const {
    const auto& list = timing_.order().ranks[move.rank];
    const int task = list[move.from];
    const int step = move.to > move.from ? 1 : -1;
    for (int at = move.from + step; at != move.to + step; at += step) {
      if (tabu_[step > 0 ? key(list[at], task) : key(task, list[at])] > now) return true;
    }
    return false;
  }

  void find_moves() {
    timing_.critical_path(random_, path_);
    for (size_t begin = 0; begin < path_.size();) {
      size_t end = begin + 1;
      const int rank = problem_.rank(path_[begin]);
      while (end < path_.size() && problem_.rank(path_[end]) == rank &&
             timing_.position(path_[end]) == timing_.position(path_[end - 1]) + 1) {
        ++end;
      }
      if (end - begin > 1) {
        block_moves(rank, timing_.position(path_[begin]), timing_.position(path_[end - 1]), begin == 0,
                    end == path_.size());
      }
      begin = end;
    }
  }

  // Moves to and across the edges of a block. In the first block of a path only its end matters, in the last
  // block only its begin.
  void block_moves(int rank, int first, int last, bool is_first, bool is_last) {
    const size_t before = moves_.size();
    const auto add = [&](int from, int to) {
      if (from != to && moves_.size() - before < kMovesPerBlock && allowed(rank, from, to)) {
        moves_.push_back({rank, from, to});
      }
    };
    for (int i = 1; i <= std::min(kLongestMove, last - first); ++i) {
      if (!is_last) {
        add(last - i, last);             // another op after the last one
        if (i > 1) add(last, last - i);  // the last op further to the front
      }
      if (!is_first) {
        add(first + i, first);
        if (i > 1) add(first, first + i);
      }
    }
  }

  bool allowed(int rank, int from, int to) const {
    const auto& list = timing_.order().ranks[rank];
    const int task = list[from];
    const int step = to > from ? 1 : -1;
    for (int at = from + step; at != to + step; at += step) {
      const int a = step > 0 ? task : list[at];
      const int b = step > 0 ? list[at] : task;
      if (problem_.precedes(a, b, timing_.fused(b))) return false;
    }
    return timing_.stays_acyclic(rank, from, to) && timing_.stays_within_cap(rank, from, to);
  }

  // Fuses or splits a few backwards at random if the stash is bigger than the activations. B needs no room
  // for the stash. No move of a single op could achieve this.
  void toggle_fused(TaskOrder& order) {
    for (size_t left = 1 + random_.below(4); left > 0; --left) {
      const int stage = fusible_[random_.below(fusible_.size())];
      const int p1 =
          problem_.task(Op::kBackwardP1, stage, static_cast<int>(random_.below(static_cast<size_t>(problem_.units()))));
      const int p2 = problem_.task(Op::kBackwardP2, stage, problem_.place(p1));
      auto& list = order.ranks[problem_.rank(p1)];
      const auto at = std::find(list.begin(), list.end(), p1);
      char& fused = order.fused[problem_.slot(p1)];
      TaskOrder changed = order;
      auto& to = changed.ranks[problem_.rank(p1)];
      const auto index = at - list.begin();
      if (fused != 0) {
        to.insert(to.begin() + index + 1, p2);
      } else {
        // Earlier W of the stage must be done by then.
        if (p2 % problem_.units() > 0 && std::find(list.begin(), at, p2 - 1) == at &&
            order.fused[problem_.slot(p1) - 1] == 0) {
          continue;
        }
        to.erase(std::find(to.begin() + index, to.end(), p2));
      }
      changed.fused[problem_.slot(p1)] = fused == 0 ? 1 : 0;
      if (problem_.fits(changed)) order = std::move(changed);
    }
  }

  // Restarts from the best order, after a few random moves.
  void restart(TaskOrder best) {
    if (!fusible_.empty() && random_.below(3) > 0) toggle_fused(best);
    timing_.reset(std::move(best));
    timing_.update();
    std::fill(tabu_.begin(), tabu_.end(), 0);
    // Under a tight cap most moves are refused, so many are tried, with short and long lengths.
    size_t left = 1 + random_.below(12);
    for (size_t attempt = 0; attempt < 40 && left > 0; ++attempt) {
      const int rank = static_cast<int>(random_.below(static_cast<size_t>(problem_.ranks())));
      const int size = static_cast<int>(timing_.order().ranks[rank].size());
      const int from = static_cast<int>(random_.below(static_cast<size_t>(size)));
      const int reach = random_.below(2) == 0 ? 1 : 6;
      const int to =
          std::clamp(from + static_cast<int>(random_.below(2 * static_cast<size_t>(reach) + 1)) - reach, 0, size - 1);
      if (from == to || !allowed(rank, from, to)) continue;
      timing_.move(rank, from, to);
      timing_.update();
      --left;
    }
  }

  const PipelineProblem& problem_;
  OrderTiming timing_;
  SearchRandom random_;
  std::vector<int> fusible_;  // stages that may profit from B
  std::vector<long> tabu_;    // the iteration until which the pair must not be put in this order
  std::vector<int> path_;
  std::vector<Move> moves_;
};

}  // namespace

double order_seconds(const PipelineProblem& problem, const TaskOrder& order) {
  return OrderTiming(problem, order).update();
}

SearchResult improve_order(const PipelineProblem& problem, TaskOrder start, long iterations, double good_enough,
                           uint64_t seed) {
  return Search(problem, std::move(start), seed).run(iterations, good_enough);
}

}  // namespace twobp
