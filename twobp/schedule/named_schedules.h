// The schedules that have a name: what each is, how it places its stages, and how to make it ready to run.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "twobp/schedule/placement.h"
#include "twobp/schedule/schedule.h"

namespace twobp {

struct NamedSchedule {
  std::string_view name;
  std::string_view what;  // a line for --help
  // F and B, or F, I and W where `places_p2`; checks stages, ranks and micro-batches and says what it admits.
  Schedule (*generate)(int stages, int ranks, int micro_batches);
  Placement placement = Placement::kLinear;
  bool places_p2 = false;          // puts W itself (zero bubble)
  int micro_batches_per_rank = 1;  // the default M is this times N; 0: 1
  // Whether the generator takes so many micro-batches on so many ranks; null: any from 1 on.
  bool (*takes)(int ranks, int micro_batches) = nullptr;
};

// In the order of --help. naive, gpipe, 1f1b, the paper's presets 1f1b-1 (M = N) and 1f1b-2 (M = 2N), which
// are 1f1b with a default M (arXiv 2405.18047, section 3), and those of generators/.
const std::vector<NamedSchedule>& named_schedules();
std::vector<std::string> schedule_names();
// Throws Error naming the nearest.
const NamedSchedule& named_schedule(std::string_view name);

// The number of ranks for so many stages, where nothing else is said: stages over the placement's usual
// stages a rank. Throws Error when that does not divide.
int default_ranks(std::string_view name, int stages);
// The number of micro-batches a schedule has unless it is told; `stages` as for make_schedule.
int default_micro_batches(std::string_view name, int stages, int ranks = 0);
// The policy it has unless it is told: placed where it places W itself, else fill.
P2Policy default_policy(std::string_view name);

// Those it can have: off, end, cooldown, fill, and placed where it places W itself.
std::vector<P2Policy> policies_of(std::string_view name);

// Whether make_schedule takes these, under any of policies_of. Throws Error for an unknown name.
bool admits(std::string_view name, int stages, int ranks, int micro_batches);

struct NamedVariant {
  std::string_view name;
  P2Policy policy = P2Policy::kOff;
};
// Every named schedule that is admitted and has this placement, under each of its policies, in the order of
// --help.
std::vector<NamedVariant> named_schedules_on(const std::vector<int>& rank_of_stage, int micro_batches);

// The schedule of that name, ready to run: generator, p2 policy, sends and receives, validated. `ranks` 0:
// default_ranks. Throws Error for an unknown name (naming the nearest), and for stages, ranks or
// micro-batches that the schedule does not admit.
Schedule make_schedule(std::string_view name, int stages, int micro_batches, P2Policy policy, int ranks = 0);
// forward_only, ready to run.
Schedule make_forward_schedule(const std::vector<int>& rank_of_stage, int micro_batches);

}  // namespace twobp
