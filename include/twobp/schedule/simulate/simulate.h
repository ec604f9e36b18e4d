// Simulates the time, idle time and bytes of a schedule from given costs. It is a discrete-event simulation of the
// executor's instruction lists, with the executor's rules (fill, byte cap).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "twobp/schedule/schedule.h"
#include "twobp/schedule/simulate/stage_cost.h"

namespace twobp {

// A link that several pairs of ranks share, such as the network card of a node. It carries one message at a time, in
// the order in which they are sent.
struct SharedLink {
  std::string name;                          // for error messages
  std::vector<std::pair<int, int>> between;  // ordered pairs of ranks: from, to
  double latency = 0;                        // seconds from a message's last byte until the receiver has it
  double bytes_per_second = 0;               // 0: no limit
};

// Copies of the whole pipeline that sum their gradients before the optimizer. All copies are assumed to keep the same
// time. An exchange of tokens (LayerCost::forward_to_experts) takes latency + bytes / bytes_per_second of its link,
// after the rank's one before, but beside sums. A stage's sum starts when its last W is done and the rank's previous
// sum has ended. A ring takes latency + 2 (d - 1) / d x gradient_bytes / bytes_per_second. Of shared experts, the h = d
// / e replicas that hold the same ones send each other (h - 1) / h of their e parts, and as much of the sum.
struct DataParallel {
  int replicas = 1;
  double latency = 0;           // seconds, of one sum
  double bytes_per_second = 0;  // 0: no limit
  bool overlap = true;          // sums run in parallel with the rank's other ops; else after the last of them
  // Above 0: the sums are of buckets instead of stages. A bucket takes layers of one stage, from the rank's last layer
  // on, until it has at least this many gradient bytes. It starts when the last W of its layers is done and the
  // previous bucket has left the link. The latency of a sum overlaps the transfer of the next.
  double bucket_bytes = 0;
  int experts = 1;                       // e: replicas that share the experts of each layer
  double exchange_latency = 0;           // of one exchange of tokens
  double exchange_bytes_per_second = 0;  // 0: no limit
};

// The rank on whose account a message is between its send and its receive. A change that one rank makes in another's
// memory counts from the next op of that other rank on.
enum class MessageHolder : uint8_t {
  kNobody,
  kSender,    // until the receiver takes it: the in-process transport
  kReceiver,  // from the send on: a buffered transport
};

// One op as it ran, in an order recorded from a real run or a simulation.
struct RecordedOp {
  Op op = Op::kForward;  // F, I or W; B counts as I and W; receives may be left out
  int stage = 0;
  int micro_batch = 0;
  int pieces = 0;  // of W; 0: all remaining ones of this micro-batch
};

struct SimulationOptions {
  double message_seconds = 0;        // latency: from the end of the sending op until the receiver has it
  std::vector<double> cap_per_rank;  // most bytes a rank may hold; empty or 0: no cap

  // The speed of the links. Each ordered pair of ranks has its own link, with the latency above, which carries one
  // message at a time. 0: no limit. Pairs named by a shared link use that one.
  double bytes_per_second = 0;
  std::vector<SharedLink> shared_links;
  DataParallel data_parallel;
  MessageHolder message_holder = MessageHolder::kNobody;
  P2Order p2_order = P2Order::kOldest;  // ignored for a recorded order, which has its own
  // By stage: whether its gradients are streamed. Its W then waits for the end of its I, whatever the schedule says,
  // and runs with all micro-batches of a unit, that of small gradients first; with replicas, layer by layer. Gradients
  // take LayerCost::p1_gradient at any time, and others during their W alone. Ignored for a recorded order. Empty:
  // none.
  std::vector<bool> streams;

  // A step between others, each of which runs F of frozen stages (Schedule::frozen) for the first micro-batches of the
  // next: so many of the first stage, at most as many as there are frozen ones, and of each further stage one less.
  // Those of the first run layer by layer in the waits of their rank, after its own F of that stage, when no W is
  // pending and they fit under the cap. The rest, and the others, run when their rank has done all else. Not with
  // slices or a recorded order.
  int ahead = 0;

  // By rank: the order in which ops really ran. An F or I in parts counts at its first part. F and I must come as in
  // the schedule. W comes after its I begins: it may have run between the layers of an I, to make room. W runs before
  // the receive that it was recorded before. If receives were not recorded, a wait under `fill` runs the W recorded
  // before the next F or I, and the rest of it runs right before that op. Empty: no recorded order.
  std::vector<std::vector<RecordedOp>> recorded;

  // For a step that follows another one without a barrier (for_training.h). By rank: the time when it may begin; empty:
  // all at 0. Before `norm_known` no rank passes its leading F (check/walk.h), because the norm of the
  // previous step's gradients decides its weights.
  std::vector<double> begin;
  double norm_known = 0;

  bool reject_over_cap = false;  // throw Error, with the smallest sufficient cap, if an op does not fit
  bool timeline = true;          // keep RankSimulation::timeline: 48 bytes for each op
  bool check = true;             // validate the schedule first; false only for one that is certainly valid
};

// The causes of a rank's idle time. IdleCause describes a wait while it happens. This describes it after the step. The
// five causes add up to the idle time.
//   imbalance      the work of the busiest rank less that of this one: no order of the ops could remove it.
//                  It is subtracted from the other four, first from `nothing`, then dependency, start-up,
//                  communication;
//   communication  the input or tokens of experts were sent but had not arrived (queued, or on their way), or gradients
//                  were summed;
//   start-up       before the rank's first F, until its input was sent;
//   dependency     after it, the input was not computed yet while the policy held back pending W, or B was
//                  not split into I and W;
//   nothing        the same with no W pending, and after the rank's last op: nothing was left to fill with.
enum class BubbleCause : int { kStartUp, kDependency, kCommunication, kImbalance, kNothing };
inline constexpr int kBubbleCauses = 5;
// "start-up", "dependency", "communication", "imbalance", "nothing left to fill"
std::string_view bubble_cause_name(BubbleCause cause);

// One op as it ran. W pieces of a micro-batch that ran back to back are one entry. B becomes an I entry followed by a W
// entry.
struct SimulatedOp {
  Op op = Op::kForward;
  int stage = 0;
  int micro_batch = 0;
  double begin = 0;
  double end = 0;
  int part = 0;           // of an F or I that W interrupted to make room (only with StageCost::layers); counted from 0
  int pieces = 0;         // of W
  double held_bytes = 0;  // of the rank at its end; an output counts until it is sent
};

// The most bytes held, and when first: during this op or at its end. Without bytes: stage -1.
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
  std::array<double, kBubbleCauses> bubble{};  // by BubbleCause; its sum is that of `idle`
  double peak_bytes = 0;                       // activations, stash and messages
  Peak peak;                                   // the time and the op of peak_bytes
  double fixed_bytes = 0;                      // of its stages
  double update_bytes = 0;                     // the most of its stages
  int peak_in_flight = 0;                      // micro-batches (of any of its stages) between F and W
  double exposed = 0;                          // wait for sums over replicas after its last W; part of `idle`
  double exchanges = 0;                        // that tokens of experts are on their way, waited for or not
  double end = 0;                              // when it has ended, optimizer included
  std::vector<SimulatedOp> timeline;

  // All that the rank needs.
  double total_peak_bytes() const { return std::max(peak_bytes, update_bytes) + fixed_bytes; }
};

struct Simulation {
  double step_seconds = 0;  // until the last rank has ended, optimizer included
  std::vector<RankSimulation> ranks;
  std::vector<Peak> stage_peaks;  // by stage; activations, stash and messages

  // 1 - busy / step of one rank.
  double idle_fraction(int rank) const;
  // The mean of idle_fraction over ranks: the bubble ratio.
  double bubble_ratio() const;
};

// `costs` has one entry for each stage, or a row of these for each micro-batch, in order. Fewer rows, whose number
// divides that of the micro-batches, repeat: so one row for each slice. What is of a stage alone (optimizer,
// gradient_bytes, fixed_bytes, update_bytes) is read from the first row, and a stage has the same layers and p2_units
// in all rows. Bytes: F adds activation_bytes at its start, I
// replaces them by stash_bytes at its end, each W piece frees its share. A received message is held until its op
// begins. A message to be sent is held from its op's end until its send (or, within a rank, until the next stage's op
// begins).
//
// Before an F, an I or a receive that would push the rank over its cap, the oldest pending W runs piece by piece until
// the op fits, whatever the policy. With layers this also happens inside an op, where the last resort is the W of the
// same I, for the layers it has passed. Waits run W if fills_waits says so. An op that cannot fit at all runs anyway
// (see reject_over_cap). B works layer by layer: it frees its activations at its end, has no stash and so never needs
// room. A schedule without any backward holds an F's bytes only while it runs, and has no optimizer.
//
// Zero is a valid cost. Time and memory grow linearly with the number of instructions. With shared links or a message
// holder, all ranks advance in the order of time, which adds a factor of the logarithm of the ranks.
//
// Throws Error if costs are missing, negative or not finite, or the schedule is not valid (see validate).
Simulation simulate(const Schedule& schedule, const std::vector<StageCost>& costs,
                    const SimulationOptions& options = {});

// Whether waiting ranks run W. They do under `fill`. Under `end` and `cooldown` they do if the W that these hold back
// takes some rank over its cap: there, making room would delay that rank alone, and all others would wait for it.
bool fills_waits(const Schedule& schedule, const std::vector<StageCost>& costs, const SimulationOptions& options);

// The smallest caps, by rank, under which no op exceeds its rank's cap: the bytes that remain if every W that can run
// before an F, an I or a receive does run. If W needs bytes itself (LayerCost::p2_peak), a slightly lower cap may
// suffice. With a message holder, a rank's bytes also depend on the clocks of others, and the caps hold for this one
// run.
std::vector<double> smallest_caps(const Schedule& schedule, const std::vector<StageCost>& costs,
                                  SimulationOptions options = {});

// The order of a simulation, to run it again. Throws Error if it has no timeline.
std::vector<std::vector<RecordedOp>> recorded_order(const Simulation& simulation);

// One shared link for each node of `ranks_per_node` ranks, for the messages that leave the node.
std::vector<SharedLink> node_links(int ranks, int ranks_per_node, double latency, double bytes_per_second);

// Draws the simulated timeline to scale. One cell stands for `unit` time and is as wide as the widest label ("F12", or
// "2F12" if a rank has several stages) and a space. An op spans the cells from round(begin / unit) to round(end /
// unit), at least one. Idle cells are dots, the optimizer is "O". A grid longer than `max_width` columns is wrapped
// into panels of that width; 0: never wrapped. Throws Error if unit is not above 0 or the grid would have more than 20
// million cells.
std::string draw_grid(const Schedule& schedule, const Simulation& simulation, double unit, int max_width = 0);

// Draws the instruction lists, one line for each rank. If marked_rank >= 0, one cell is marked >like this<, and of a
// schedule too big for a screen only the neighbourhood of the mark is shown.
std::string draw_instructions(const Schedule& schedule, int marked_rank = -1, int marked_index = -1);

}  // namespace twobp
