// The time, the idle time and the bytes of a schedule, from given costs: discrete events over the same
// instruction lists and with the same rules (fill, byte cap) as the executor.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "twobp/schedule/p2_order.h"
#include "twobp/schedule/schedule.h"
#include "twobp/schedule/simulate/idle_cause.h"
#include "twobp/schedule/simulate/stage_cost.h"

namespace twobp {

// A way for messages that several pairs of ranks share, such as the network card of a node. One message at a
// time, in the order they are sent.
struct SharedLink {
  std::string name;                          // for messages
  std::vector<std::pair<int, int>> between;  // ordered pairs of ranks: from, to
  double latency = 0;                        // seconds from a message's last byte until the receiver has it
  double bytes_per_second = 0;               // 0: no limit
};

// Copies of the whole pipeline that sum their gradients before the optimizer. All copies are taken to keep
// the same time. A stage's sum starts when its last W is done and the rank's sum before it is; a ring takes
// latency + 2 (d - 1) / d x gradient_bytes / bytes_per_second.
struct DataParallel {
  int replicas = 1;
  double latency = 0;           // seconds, of one sum
  double bytes_per_second = 0;  // 0: no limit
  bool overlap = true;          // beside the rank's other ops; else after the last of them
  // Above 0: sums are of buckets instead of stages. Layers are taken from the rank's last one on, at least so
  // many gradient bytes of one stage a bucket; a bucket starts when its layers' last W is done and the one
  // before has left the link. The latency of one runs beside the transfer of the next.
  double bucket_bytes = 0;
};

// On whose account a message is between its send and its receive. What one rank changes in another's memory
// counts from that one's next op on.
enum class MessageHolder : uint8_t {
  kNobody,
  kSender,    // until the receiver takes it: the in-process transport
  kReceiver,  // from the moment it is sent: a buffered transport
};

// One op as it ran, of an order recorded from a real run or a simulation.
struct RecordedOp {
  Op op = Op::kForward;  // F, I or W; B as I and W; receives may be left out
  int stage = 0;
  int micro_batch = 0;
  int pieces = 0;  // of W; 0: all that are left of this micro-batch
};

struct SimulationOptions {
  double message_seconds = 0;        // latency: from the end of the sending op until the receiver has it
  std::vector<double> cap_per_rank;  // most bytes a rank may hold; empty or 0: no cap

  // Each ordered pair of ranks has a link of its own, of this speed and the latency above, which carries one
  // message at a time. 0: no limit. Pairs named by a shared link use that one.
  double bytes_per_second = 0;
  std::vector<SharedLink> shared_links;
  DataParallel data_parallel;
  MessageHolder message_holder = MessageHolder::kNobody;
  P2Order p2_order = P2Order::kOldest;  // not of a recorded order, which has its own

  // By rank: the order in which ops really ran, an F or I in parts at its first. F and I must come as in the
  // schedule, W behind its I (it may have run between the layers of one, to make room). W runs before the
  // receive that it was recorded before; where receives were not recorded, a wait under `fill` runs the W
  // recorded before the next F or I, and what is left of it runs right before that op. Empty: none.
  std::vector<std::vector<RecordedOp>> recorded;

  // Of a step that follows another one without a barrier (step_periods.h). By rank: when it may begin; empty:
  // all at 0. Before `norm_known` no rank gets beyond its leading F (check/leading_forwards.h): the norm of
  // the gradients of the step before decides on its weights.
  std::vector<double> begin;
  double norm_known = 0;

  bool reject_over_cap = false;  // Error, naming the smallest cap that would do, where an op does not fit
  bool timeline = true;          // keep RankSimulation::timeline: 40 bytes an op
  bool check = true;             // validate the schedule first; false only for one that is valid for certain
};

// Where the idle time of a rank comes from. What IdleCause tells while it happens, seen from the end: the
// five add up to the idle time.
//   imbalance      the work of the busiest rank less that of this one: no order of the ops could remove it.
//                  It is taken out of the other four, first from `nothing`, then dependency, start-up,
//                  communication.
//   communication  the input was sent but not there yet (queued, or on its way), or gradients being summed;
//   start-up       before the rank's first F, until its input was sent;
//   dependency     later, its input was not computed yet while W was pending that the policy holds back; or
//                  there is no W apart from B;
//   nothing        the same with no W pending, and after the rank's last op: nothing was left to fill.
enum class BubbleCause : int { kStartUp, kDependency, kCommunication, kImbalance, kNothing };
inline constexpr int kBubbleCauses = 5;
// "start-up", "dependency", "communication", "imbalance", "nothing left to fill"
std::string_view bubble_cause_name(BubbleCause cause);

// One op as it ran. W pieces of a micro-batch that ran back to back are one entry. B appears as an I entry
// followed by a W entry.
struct SimulatedOp {
  Op op = Op::kForward;
  int stage = 0;
  int micro_batch = 0;
  double begin = 0;
  double end = 0;
  int part = 0;    // of an F or I that W interrupted to make room (only with StageCost::layers), from 0
  int pieces = 0;  // of W
};

// The most bytes there were, and when first: during, or at the end of, this op. Without bytes: stage -1.
struct Peak {
  double bytes = 0;
  double seconds = 0;  // on the simulation's clock
  Op op = Op::kForward;
  int stage = -1;
  int micro_batch = -1;
};

struct RankSimulation {
  double busy = 0;                             // F + I + W + optimizer
  std::array<double, kIdleCauses> idle{};      // by IdleCause; busy + sum(idle) = step, less begin
  std::array<double, kBubbleCauses> bubble{};  // by BubbleCause; the same sum
  double peak_bytes = 0;                       // activations, stash and messages
  Peak peak;                                   // when
  double fixed_bytes = 0;  // of its stages; peak_bytes + fixed_bytes is all the rank needs
  int peak_in_flight = 0;  // micro-batches (of any of its stages) between F and W
  double exposed = 0;      // waited for sums over replicas after its last W; part of `idle`
  double end = 0;          // when it is done, optimizer included
  std::vector<SimulatedOp> timeline;

  double total_peak_bytes() const { return peak_bytes + fixed_bytes; }
};

struct Simulation {
  double step_seconds = 0;  // until the last rank is done, optimizer included
  std::vector<RankSimulation> ranks;
  std::vector<Peak> stage_peaks;  // by stage; activations, stash and messages

  // 1 - busy / step of one rank.
  double idle_fraction(int rank) const;
  // The mean of it over ranks: the bubble ratio.
  double bubble_ratio() const;
};

// `costs` has one entry a stage. Bytes: F adds activation_bytes at its start, I replaces them by stash_bytes
// at its end, each W piece frees its share. A received message is held until its op begins, one to be sent
// from its op's end until its send (or, within a rank, until the next stage's op begins). Before an F, an I
// or a receive that would push the rank over its cap, the oldest pending W runs piece by piece until it fits,
// whatever the policy; with layers also in between, and then W of the very I under way, as far as it has
// come; and waits run W wherever fills_waits says so. What cannot fit at all runs anyway (see
// reject_over_cap). B works layer by layer: it frees its activations at its end, has no stash and so never
// needs room. A schedule without any backward holds an F's bytes only while it runs, and has no optimizer.
//
// Zero is a valid cost. Time and memory grow linearly with the number of instructions (times the logarithm of
// the ranks with shared links or a message holder, where all ranks advance in the order of time).
//
// Throws Error when costs are missing, negative or not finite, or the schedule is not valid (see validate).
Simulation simulate(const Schedule& schedule, const std::vector<StageCost>& costs,
                    const SimulationOptions& options = {});

// Whether ranks that wait run W meanwhile: under `fill`; under `end` and `cooldown` where what these hold
// back takes some rank over its cap. W that makes room there hurries that rank alone, and all others wait for
// it.
bool fills_waits(const Schedule& schedule, const std::vector<StageCost>& costs,
                 const SimulationOptions& options);

// The smallest caps, by rank, under which nothing runs over its cap: what remains when every W that can run
// before an F, an I or a receive does; where W needs bytes itself (LayerShare::p2_peak), a little less may
// do. With a message holder a rank's bytes also follow the clocks of others, and the caps are those of this
// one run.
std::vector<double> smallest_caps(const Schedule& schedule, const std::vector<StageCost>& costs,
                                  SimulationOptions options = {});

// The order of a simulation, to run it again. Throws Error for one without timeline.
std::vector<std::vector<RecordedOp>> recorded_order(const Simulation& simulation);

// One shared link out of each node of `ranks_per_node` ranks, for the messages that leave it.
std::vector<SharedLink> node_links(int ranks, int ranks_per_node, double latency, double bytes_per_second);

}  // namespace twobp
