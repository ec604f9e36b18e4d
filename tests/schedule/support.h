// The schedule tests share these helpers: messages of errors, and schedules for any placement of stages on ranks.
#pragma once

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/expect_error.h"
#include "twobp/core/check.h"
#include "twobp/schedule/schedule.h"

namespace twobp {

inline const std::vector<P2Policy> kPolicies = {P2Policy::kOff, P2Policy::kEnd, P2Policy::kCooldown, P2Policy::kFill};

using test::error_of;
using test::expect_contains;

// Returns "1F3" of a message that contains ">1F3<", or an empty string without a mark.
inline std::string marked_cell(const std::string& message) {
  const size_t begin = message.find('>');
  const size_t end = message.find('<');
  if (begin == std::string::npos || end == std::string::npos || end < begin) return "";
  return message.substr(begin + 1, end - begin - 1);
}

inline std::string text_of(const std::vector<Instruction>& list) {
  std::string text;
  for (const auto& instruction : list) {
    if (!text.empty()) text += ' ';
    text += to_string(instruction);
  }
  return text;
}

inline Schedule empty_schedule(std::vector<int> rank_of_stage, int micro_batches) {
  Schedule schedule;
  schedule.name = "test";
  schedule.stages = static_cast<int>(rank_of_stage.size());
  schedule.micro_batches = micro_batches;
  int ranks = 0;
  for (int rank : rank_of_stage) ranks = std::max(ranks, rank + 1);
  schedule.ranks.resize(ranks);
  schedule.rank_of_stage = std::move(rank_of_stage);
  return schedule;
}

// Makes a schedule with all F stage by stage, then all B back. It has no deadlock for any placement.
inline Schedule looped_gpipe(std::vector<int> rank_of_stage, int micro_batches) {
  Schedule schedule = empty_schedule(std::move(rank_of_stage), micro_batches);
  for (int i = 0; i < 2 * schedule.stages; ++i) {
    const bool forward = i < schedule.stages;
    const int stage = forward ? i : 2 * schedule.stages - 1 - i;
    for (int m = 0; m < micro_batches; ++m) {
      schedule.ranks[schedule.rank_of_stage[stage]].push_back({forward ? Op::kForward : Op::kBackward, stage, m});
    }
  }
  return schedule;
}

using Random = std::mt19937;

inline int random_int(Random& random, int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(random);
}

// Makes a valid schedule without communication, in random order, on a random placement. Ops that can run are appended
// to their ranks one by one. With `place_w`, it mixes B, I and its own W. Otherwise it has B only.
inline Schedule random_schedule(Random& random, int stages, int micro_batches, int ranks, bool place_w) {
  std::vector<int> placement(stages);
  for (int& rank : placement) rank = random_int(random, 0, ranks - 1);
  placement[random_int(random, 0, stages - 1)] = ranks - 1;  // so that there are `ranks` ranks
  Schedule schedule = empty_schedule(std::move(placement), micro_batches);
  std::vector<int> f(stages, 0);
  std::vector<int> b(stages, 0);  // I or B
  std::vector<int> w(stages, 0);
  while (true) {
    std::vector<Instruction> ready;
    for (int s = 0; s < stages; ++s) {
      if (f[s] < micro_batches && (s == 0 || f[s - 1] > f[s])) ready.push_back({Op::kForward, s, f[s]});
      if (b[s] < f[s] && (s + 1 == stages || b[s + 1] > b[s])) {
        const bool fused = w[s] == b[s] && (!place_w || random_int(random, 0, 2) == 0);
        ready.push_back({fused ? Op::kBackward : Op::kBackwardP1, s, b[s]});
      }
      if (w[s] < b[s]) ready.push_back({Op::kBackwardP2, s, w[s]});
    }
    if (ready.empty()) return schedule;
    const Instruction& chosen = ready[random_int(random, 0, static_cast<int>(ready.size()) - 1)];
    schedule.ranks[schedule.rank_of_stage[chosen.stage]].push_back(chosen);
    f[chosen.stage] += chosen.op == Op::kForward;
    b[chosen.stage] += chosen.op == Op::kBackwardP1 || chosen.op == Op::kBackward;
    w[chosen.stage] += chosen.op == Op::kBackwardP2 || chosen.op == Op::kBackward;
  }
}

}  // namespace twobp
