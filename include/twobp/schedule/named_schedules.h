// The schedules that have a name: a description of each, its placement of stages, and a way to make it ready to run.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "twobp/schedule/schedule.h"

namespace twobp {

// The placement of stages on ranks. Only this file does arithmetic with rank numbers.
enum class Placement : uint8_t {
  kLinear,  // stage s on rank s
  kLooped,  // stage s on rank s mod N: the model goes round the ranks several times ("interleaved")
  kV,       // two stages on each rank, down and back up: rank r has stages r and 2N - 1 - r
};
// "linear", "looped", "v".
std::string_view placement_name(Placement placement);

// The default number of stages on each rank: 1, 2, 2.
int usual_stages_per_rank(Placement placement);

// Whether `stages` divide into `ranks` as the placement requires: linear one stage on each rank, V two, looped any
// whole number.
bool placement_fits(Placement placement, int stages, int ranks);

// The rank of each stage. Throws Error unless placement_fits.
std::vector<int> place_stages(Placement placement, int stages, int ranks);

struct NamedSchedule {
  std::string_view name;
  std::string_view what;  // a line for --help
  // Makes F and B, or F, I and W if `places_p2`. Takes any M from 1 on. Errors say which stages and ranks it admits.
  Schedule (*generate)(int stages, int ranks, int micro_batches, int slices);
  Placement placement = Placement::kLinear;
  bool places_p2 = false;          // places W itself (zero bubble)
  int micro_batches_per_rank = 1;  // the default M is this times N; 0: M = 1
  bool takes_slices = true;        // see Schedule
};

// In the order of --help: naive, gpipe, 1f1b, the paper's presets 1f1b-1 (M = N) and 1f1b-2 (M = 2N), which are 1f1b
// with a default M (arXiv 2405.18047, section 3), and the schedules of generators/.
const std::vector<NamedSchedule>& named_schedules();
std::vector<std::string> schedule_names();
// Throws Error, which suggests the nearest name.
const NamedSchedule& named_schedule(std::string_view name);

// The default number of ranks for this many stages: stages divided by the placement's usual stages per rank. Throws
// Error if that does not divide.
int default_ranks(std::string_view name, int stages);
// The schedule's default number of micro-batches. `stages` as for make_schedule.
int default_micro_batches(std::string_view name, int stages, int ranks = 0);
// The policies that it can have: off, end, cooldown, fill, and placed if it places W itself.
std::vector<P2Policy> policies_of(std::string_view name);

// The most slices of micro-batches of stages, stages x M x k, that make_schedule takes: more would not fit into memory.
inline constexpr int64_t kMostSlots = int64_t{1} << 26;

// Throws Error above kMostSlots.
void check_size(int stages, int micro_batches, int slices = 1);

// Whether make_schedule takes these numbers, under any of policies_of. Throws Error for an unknown name.
bool admits(std::string_view name, int stages, int ranks, int micro_batches, int slices = 1);

struct NamedVariant {
  std::string_view name;
  P2Policy policy = P2Policy::kOff;
};
// Every named schedule that has this placement and admits these numbers, under each of its policies, in the order of
// --help.
std::vector<NamedVariant> named_schedules_on(const std::vector<int>& rank_of_stage, int micro_batches, int slices = 1);

// The named schedule, ready to run: generator, p2 policy, sends and receives, validated. `ranks` 0: default_ranks. With
// `slices` k, each of the micro-batches is cut into k, and the schedule has k times as many (see Schedule). Throws
// Error for an unknown name (it suggests the nearest), and for stages, ranks, micro-batches or slices that the schedule
// does not admit.
Schedule make_schedule(std::string_view name, int stages, int micro_batches, P2Policy policy, int ranks = 0,
                       int slices = 1);
// forward_only, ready to run.
Schedule make_forward_schedule(const std::vector<int>& rank_of_stage, int micro_batches);

}  // namespace twobp
