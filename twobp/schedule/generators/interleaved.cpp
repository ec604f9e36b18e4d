// A rank's F follow one fixed order. Its B follow the same order with the chunks reversed. The schedules differ in how
// far F is ahead.
#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "twobp/schedule/generators/generators.h"
#include "twobp/schedule/named_schedules.h"

namespace twobp {
namespace {

Schedule looped(std::string_view name, int stages, int ranks, int micro_batches, int slices) {
  Schedule schedule = empty_schedule(name, place_stages(Placement::kLooped, stages, ranks), micro_batches, slices);
  for (auto& list : schedule.ranks) {
    list.reserve(2 * static_cast<size_t>(stages / ranks) * schedule.micro_batches);
  }
  return schedule;
}

// Whole micro-batches that have at least as many slices as there are ranks.
int smallest_round(int ranks, int slices) {
  return (ranks + slices - 1) / slices;
}

int rounds_of(const Schedule& schedule) {
  const int micro_batches = schedule.micro_batches / schedule.slices;
  return std::max(1, micro_batches / smallest_round(schedule.rank_count(), schedule.slices));
}

// In slices.
int largest_round(const Schedule& schedule) {
  const int micro_batches = schedule.micro_batches / schedule.slices;
  const int rounds = rounds_of(schedule);
  return (micro_batches + rounds - 1) / rounds * schedule.slices;
}

struct Turn {
  int chunk = 0;
  int micro_batch = 0;
};

// All (chunk, micro-batch): round by round, and chunk by chunk within a round.
std::vector<Turn> depth_first(int chunks, const Schedule& schedule) {
  const int micro_batches = schedule.micro_batches / schedule.slices;
  const int rounds = rounds_of(schedule);
  std::vector<Turn> cells;
  cells.reserve(static_cast<size_t>(chunks) * schedule.micro_batches);
  int first = 0;
  for (int round = 0; round < rounds; ++round) {
    const int size = (micro_batches / rounds + (round < micro_batches % rounds ? 1 : 0)) * schedule.slices;
    for (int chunk = 0; chunk < chunks; ++chunk) {
      for (int i = 0; i < size; ++i) cells.push_back({chunk, first + i});
    }
    first += size;
  }
  return cells;
}

// F is `per_hop` further ahead for each rank after this one; `backward` is B or I.
Schedule interleaved(std::string_view name, int stages, int ranks, int micro_batches, int slices, int per_hop,
                     Op backward) {
  Schedule schedule = looped(name, stages, ranks, micro_batches, slices);
  const int chunks = stages / ranks;
  const std::vector<Turn> cells = depth_first(chunks, schedule);
  const size_t round = largest_round(schedule);
  for (int rank = 0; rank < ranks; ++rank) {
    auto& list = schedule.ranks[rank];
    const size_t ahead =
        std::min((chunks - 1) * round + static_cast<size_t>(per_hop) * (ranks - 1 - rank) + slices - 1, cells.size());
    for (size_t i = 0; i < cells.size() + ahead; ++i) {
      if (i < cells.size()) {
        list.push_back({Op::kForward, cells[i].chunk * ranks + rank, cells[i].micro_batch});
      }
      if (i >= ahead) {
        const Turn& cell = cells[i - ahead];
        list.push_back({backward, (chunks - 1 - cell.chunk) * ranks + rank, schedule.backward_order(cell.micro_batch)});
      }
    }
  }
  return schedule;
}

}  // namespace

Schedule interleaved_one_forward_one_backward(int stages, int ranks, int micro_batches, int slices) {
  return interleaved("interleaved-1f1b", stages, ranks, micro_batches, slices, 2, Op::kBackward);
}

Schedule interleaved_zero_bubble(int stages, int ranks, int micro_batches, int slices) {
  Schedule order = interleaved("interleaved-zb", stages, ranks, micro_batches, slices, 1, Op::kBackwardP1);
  const int most_in_flight = (stages / ranks - 1) * largest_round(order) + ranks + slices - 1;
  return place_p2(std::move(order), most_in_flight);
}

Schedule looped_bfs(int stages, int ranks, int micro_batches, int slices) {
  Schedule schedule = looped("looped-bfs", stages, ranks, micro_batches, slices);
  for (int i = 0; i < 2 * stages; ++i) {
    const bool forward = i < stages;
    const int stage = forward ? i : 2 * stages - 1 - i;
    auto& list = schedule.ranks[stage % ranks];
    for (int m = 0; m < schedule.micro_batches; ++m) {
      if (forward) list.push_back({Op::kForward, stage, m});
      if (!forward) list.push_back({Op::kBackward, stage, schedule.backward_order(m)});
    }
  }
  return schedule;
}

}  // namespace twobp
