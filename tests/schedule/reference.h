// This is a second, slow simulation for comparison. It steps through whole time units and acts at each as an executor
// would, without regard to speed. Costs and delays are whole numbers of at least one per layer and piece of W. If
// several ranks can act at a tick, the lowest one does.
#pragma once

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/schedule/reference_stage.h"
#include "twobp/schedule/simulate/simulate.h"

namespace twobp {

class ReferenceExecutor {
 public:
  ReferenceExecutor(const Schedule& schedule, const std::vector<StageCost>& costs, const SimulationOptions& options)
      : schedule_(schedule), options_(options), ranks_(schedule.ranks.size()) {
    for (size_t r = 0; r < ranks_.size(); ++r) {
      for (const Instruction& range : schedule.ranks[r]) {
        for (int i = 0; i < range.count; ++i) {
          ranks_[r].list.push_back({range.op, range.stage, range.micro_batch + i});
        }
        ranks_[r].splits |= range.op == Op::kBackwardP1;
      }
    }
    for (auto row = costs.begin(); row != costs.end(); row += schedule.stages) {
      const std::vector<StageCost> of_stages(row, row + schedule.stages);
      for (int s = 0; s < schedule.stages; ++s) {
        stages_.push_back(reference_stage(schedule, of_stages, s));
        for (const Layer& layer : stages_.back().layers) {
          double& largest = ranks_[schedule.rank_of_stage[s]].largest_p2;
          largest = std::max(largest, layer.p2_peak);
        }
      }
    }
    done_at_.resize(schedule.stages);
    summed_.resize(schedule.stages);
    fills_ = schedule.fills() || (!options.cap_per_rank.empty() && comes_over_cap(costs));
  }

  Simulation run() {
    for (now_ = 0; !all_done(); now_ += 1) {
      // Messages that leave at this tick must arrive before any rank decides to fill a wait.
      while (std::any_of(ranks_.begin(), ranks_.end(), [&](Rank& rank) { return advance(rank); })) {
      }
      for (auto& rank : ranks_) fill(rank);
      for (auto& rank : ranks_) book_idle_tick(rank);
    }
    for (const int rank : schedule_.rank_of_stage) ended_.push_back(ranks_[rank].free_at);
    for (auto& rank : ranks_) sum_gradients(rank);
    Simulation result;
    for (auto& rank : ranks_) result.step_seconds = std::max(result.step_seconds, rank.free_at);
    for (auto& rank : ranks_) {
      RankSimulation out;
      out.timeline = rank.timeline;
      out.peak_bytes = rank.peak;
      out.bubble = rank.bubble;
      for (const auto& op : rank.timeline) out.busy += op.end - op.begin;
      out.bubble[static_cast<int>(BubbleCause::kNothing)] += result.step_seconds - rank.free_at;
      result.ranks.push_back(std::move(out));
    }
    return result;
  }

 private:
  using Layer = ReferenceLayer;
  using Stage = ReferenceStage;
  struct Piece {
    int stage, micro_batch, layer, left;
  };
  struct Rank {
    std::vector<Instruction> list;
    size_t at = 0;
    int layer = 0;  // of the running F or I
    int parts = 0;
    double free_at = 0;
    double bytes = 0;
    double later = 0;  // added to bytes when the running op is done
    double peak = 0;
    double largest_p2 = 0;
    bool started = false, splits = false;
    bool inside = false;  // inside an instruction that takes several steps
    std::deque<Piece> pending;
    // These are the time and bytes of changes that other ranks made to its memory.
    std::vector<std::pair<double, double>> foreign;
    std::vector<SimulatedOp> timeline;
    std::array<double, kBubbleCauses> bubble{};
  };
  struct Message {
    double sent, arrives;
  };

  // The stage as micro-batch m finds it: rows of costs repeat.
  const Stage& stage_for(int s, int m) const {
    const int rows = static_cast<int>(stages_.size()) / schedule_.stages;
    return stages_[m % rows * schedule_.stages + s];
  }

  bool all_done() const {
    return std::all_of(ranks_.begin(), ranks_.end(),
                       [&](const Rank& rank) { return rank.at == rank.list.size() && rank.free_at <= now_; });
  }

  double cap_of(const Rank& rank) const {
    return options_.cap_per_rank.empty() ? 0 : options_.cap_per_rank[&rank - ranks_.data()];
  }

  void log(Rank& rank, Op op, int stage, int m, double seconds) {
    auto& timeline = rank.timeline;
    if (!timeline.empty() && timeline.back().op == op && timeline.back().stage == stage &&
        timeline.back().micro_batch == m && timeline.back().end == rank.free_at && rank.free_at == now_) {
      timeline.back().end += seconds;
    } else {
      const int part = op == Op::kBackwardP2 ? 0 : rank.parts++;
      timeline.push_back({op, stage, m, now_, now_ + seconds, part});
    }
    rank.free_at = now_ + seconds;
  }

  void hold(Rank& rank, double bytes) {
    rank.bytes += bytes;
    rank.peak = std::max(rank.peak, rank.bytes);
  }

  void run_piece(Rank& rank, std::deque<Piece>::iterator piece) {
    const Layer& layer = stage_for(piece->stage, piece->micro_batch).layers[piece->layer];
    rank.peak = std::max(rank.peak, rank.bytes + layer.p2_peak);
    log(rank, Op::kBackwardP2, piece->stage, piece->micro_batch, layer.piece);
    rank.later = -layer.stash;
    if (--piece->left > 0) return;
    const int stage = piece->stage;
    rank.pending.erase(piece);
    const auto left =
        std::count_if(rank.pending.begin(), rank.pending.end(), [&](const Piece& p) { return p.stage == stage; });
    if (left == 0) done_at_[stage] = rank.free_at;
  }

  // Returns the memory that F or I needs for its layer number `at`.
  double need_of(const Rank& rank, Op op, const Stage& stage, int at) const {
    const int n = static_cast<int>(stage.layers.size());
    if (op == Op::kForward) {
      const Layer& layer = stage.layers[at];
      double held = layer.f_held;
      double peak = layer.f_peak;
      if (!stage.plain && stage.last && at == n - 1) {
        peak = std::max(peak, held);
        held -= stage.output;
      }
      return std::max(peak, held + rank.largest_p2);
    }
    const Layer& layer = stage.layers[n - 1 - at];
    return std::max(layer.i_peak, layer.i_held + rank.largest_p2);
  }

  // Makes one step of a free rank if it can, without filling a wait.
  bool advance(Rank& rank) {
    if (rank.free_at > now_) return false;
    hold(rank, std::exchange(rank.later, 0));
    if (!rank.inside) {
      for (const auto& change : std::exchange(rank.foreign, {})) hold(rank, change.second);
    }
    if (rank.at == rank.list.size()) return false;
    const auto [op, s, m, count] = rank.list[rank.at];
    const Stage& stage = stage_for(s, m);
    rank.inside = true;
    switch (op) {
      case Op::kSendForward:
      case Op::kSendBackward:
        send(rank, op, s, m);
        break;
      case Op::kRecvForward:
      case Op::kRecvBackward: {
        const auto found = messages_.find({op, s, m});
        if (found == messages_.end() || found->second.arrives > now_) {
          rank.inside = false;
          return false;
        }
        const double bytes = op == Op::kRecvForward ? stage.input : stage.output_gradient;
        const bool adds = options_.message_holder != MessageHolder::kReceiver && bytes > 0;
        if (adds && lacks_room(rank, bytes + rank.largest_p2)) {
          run_piece(rank, rank.pending.begin());
          return true;
        }
        if (adds) hold(rank, bytes);
        if (options_.message_holder == MessageHolder::kSender) {
          const int from = op == Op::kRecvForward ? s - 1 : s + 1;
          ranks_[schedule_.rank_of_stage[from]].foreign.emplace_back(now_, -bytes);
        }
        break;
      }
      case Op::kForward:
      case Op::kBackwardP1:
        if (!run_layer(rank, op, s, m)) return true;
        break;
      case Op::kBackward:
        if (!run_backward(rank, s, m)) return true;
        break;
      case Op::kBackwardP2: {
        const auto piece = std::find_if(rank.pending.begin(), rank.pending.end(),
                                        [s = s, m = m](const Piece& p) { return p.stage == s && p.micro_batch == m; });
        if (piece != rank.pending.end()) {
          run_piece(rank, piece);
          return true;
        }
        break;
      }
    }
    ++rank.at;
    rank.inside = false;
    return true;
  }

  // Returns whether W should run first.
  bool lacks_room(const Rank& rank, double need) const {
    const double cap = cap_of(rank);
    return cap > 0 && need > 0 && rank.bytes + need > cap && !rank.pending.empty();
  }

  // Runs one layer of F or I, or a piece of W to make room for it. Returns whether that was the last layer.
  bool run_layer(Rank& rank, Op op, int s, int m) {
    const Stage& stage = stage_for(s, m);
    const int n = static_cast<int>(stage.layers.size());
    if (lacks_room(rank, need_of(rank, op, stage, rank.layer))) {
      run_piece(rank, rank.pending.begin());
      return false;
    }
    if (rank.layer == 0) rank.parts = 0;
    rank.started = true;
    if (op == Op::kForward) {
      const Layer& layer = stage.layers[rank.layer];
      log(rank, op, s, m, layer.f);
      if (stage.plain) {  // activations come first and the output comes last
        hold(rank, layer.f_peak);
        rank.later = layer.f_held - layer.f_peak;
      } else {
        rank.peak = std::max({rank.peak, rank.bytes + layer.f_peak, rank.bytes + layer.f_held});
        rank.later = layer.f_held - (stage.last && rank.layer == n - 1 ? stage.output : 0);
      }
    } else {
      const Layer& layer = stage.layers[n - 1 - rank.layer];
      log(rank, op, s, m, layer.i);
      rank.peak = std::max(rank.peak, rank.bytes + layer.i_peak);
      rank.later = layer.i_held;
      if (layer.pieces > 0) rank.pending.push_back({s, m, n - 1 - rank.layer, layer.pieces});
    }
    if (++rank.layer < n) return false;
    rank.layer = 0;
    return true;
  }

  // Runs all of B, or a piece of another W to make room for it. Returns whether that was B.
  bool run_backward(Rank& rank, int s, int m) {
    const Stage& stage = stage_for(s, m);
    double i = 0;
    double w = 0;
    double held = 0;
    double most = 0;
    for (auto layer = stage.layers.rbegin(); layer != stage.layers.rend(); ++layer) {
      i += layer->i;
      w += layer->piece * layer->pieces;
      most = std::max(most, held + layer->i_peak);
      if (!stage.plain) most = std::max(most, held + layer->i_held + (layer->pieces > 0 ? layer->p2_peak : 0));
      held += layer->i_held - layer->stash * layer->pieces;
    }
    most = std::max(most, held);
    if (lacks_room(rank, most)) {
      run_piece(rank, rank.pending.begin());
      return false;
    }
    rank.peak = std::max(rank.peak, rank.bytes + most);
    rank.parts = 0;
    log(rank, Op::kBackwardP1, s, m, i);
    rank.timeline.push_back({Op::kBackwardP2, s, m, rank.free_at, rank.free_at + w});
    rank.free_at += w;
    rank.later = held;
    done_at_[s] = rank.free_at;
    return true;
  }

  void send(Rank& rank, Op op, int s, int m) {
    const bool forward = op == Op::kSendForward;
    const int to = forward ? s + 1 : s - 1;
    const double bytes = forward ? stage_for(s, m).output : stage_for(s, m).gradient;
    const std::pair route{schedule_.rank_of_stage[s], schedule_.rank_of_stage[to]};
    double latency = options_.message_seconds;
    double speed = options_.bytes_per_second;
    std::pair link = route;
    for (size_t i = 0; i < options_.shared_links.size(); ++i) {
      const SharedLink& shared = options_.shared_links[i];
      if (std::find(shared.between.begin(), shared.between.end(), route) == shared.between.end()) continue;
      latency = shared.latency;
      speed = shared.bytes_per_second;
      link = {-1, static_cast<int>(i)};
    }
    double& free_at = links_[link];
    free_at = std::max(free_at, now_) + (speed > 0 ? bytes / speed : 0);
    messages_[{forward ? Op::kRecvForward : Op::kRecvBackward, to, m}] = {now_, free_at + latency};
    if (options_.message_holder != MessageHolder::kSender) hold(rank, -bytes);
    if (options_.message_holder == MessageHolder::kReceiver) {
      ranks_[schedule_.rank_of_stage[to]].foreign.emplace_back(now_, bytes);
    }
  }

  void fill(Rank& rank) {
    if (!fills_ || rank.free_at > now_ || rank.at == rank.list.size() || rank.pending.empty()) return;
    run_piece(rank, rank.pending.begin());
  }

  // Returns whether a policy that holds W back makes some rank exceed its cap, if nothing makes room.
  bool comes_over_cap(const std::vector<StageCost>& costs) const {
    if (schedule_.policy != P2Policy::kEnd && schedule_.policy != P2Policy::kCooldown) return false;
    SimulationOptions free = options_;
    free.cap_per_rank.clear();
    const Simulation simulation = ReferenceExecutor(schedule_, costs, free).run();
    for (size_t r = 0; r < options_.cap_per_rank.size(); ++r) {
      const double cap = options_.cap_per_rank[r];
      if (cap > 0 && simulation.ranks[r].peak_bytes > cap) return true;
    }
    return false;
  }

  void book_idle_tick(Rank& rank) {
    if (rank.free_at > now_ || rank.at == rank.list.size()) return;
    const auto [op, s, m, count] = rank.list[rank.at];
    BubbleCause cause = BubbleCause::kNothing;
    if (messages_.count({op, s, m}) > 0) {
      cause = BubbleCause::kCommunication;
    } else if (!rank.started) {
      cause = BubbleCause::kStartUp;
    } else if (!rank.splits || !rank.pending.empty()) {
      cause = BubbleCause::kDependency;
    }
    rank.bubble[static_cast<int>(cause)] += 1;
    rank.free_at = now_ + 1;
  }

  double ready_to_sum(int stage) const { return options_.data_parallel.overlap ? done_at_[stage] : ended_[stage]; }

  void sum_gradients(Rank& rank) {
    const DataParallel& parallel = options_.data_parallel;
    const int index = static_cast<int>(&rank - ranks_.data());
    if (parallel.replicas == 1) return;
    double free_at = 0;
    while (true) {
      int next = -1;
      for (int s = 0; s < schedule_.stages; ++s) {
        if (schedule_.rank_of_stage[s] != index || summed_[s] || stages_[s].sum_bytes == 0) continue;
        if (next < 0 || ready_to_sum(s) < ready_to_sum(next)) next = s;
      }
      if (next < 0) break;
      summed_[next] = true;
      const double ready = ready_to_sum(next);
      const double round = stages_[next].sum_bytes / parallel.replicas;  // a ring sends d - 1 of these, twice
      free_at =
          std::max(free_at, ready) + parallel.latency + 2 * (parallel.replicas - 1) * round / parallel.bytes_per_second;
    }
    const double wait = std::max(0.0, free_at - rank.free_at);
    rank.bubble[static_cast<int>(BubbleCause::kCommunication)] += wait;
    rank.free_at += wait;
  }

  const Schedule& schedule_;
  const SimulationOptions& options_;
  bool fills_ = false;  // whether W fills waits
  std::vector<Rank> ranks_;
  std::vector<Stage> stages_;    // by row of costs and stage
  std::vector<double> done_at_;  // time of the last W, by stage
  std::vector<double> ended_;    // time when its rank ended, by stage
  std::vector<bool> summed_;
  std::map<std::pair<int, int>, double> links_;
  std::map<std::tuple<Op, int, int>, Message> messages_;
  double now_ = 0;
};

}  // namespace twobp
