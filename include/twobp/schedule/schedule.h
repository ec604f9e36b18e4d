// A pipeline schedule as data: a list of instructions for every rank. Generators make it, passes rewrite it, `validate`
// proves it, `simulate` times it, the grid draws it, and the executor runs it. This folder does not use torch.
//
// The letters are those of PyTorch's pipelining: F forward, I backward-p1 (input gradient), W backward-p2 (weight
// gradient), B = I then W.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace twobp {

enum class Op : uint8_t {
  kForward,       // F
  kBackwardP1,    // I
  kBackwardP2,    // W
  kBackward,      // B: I then W layer by layer; dL/dx leaves when all of it is done
  kSendForward,   // the stage's output to the next stage
  kRecvForward,   // the stage's input from the previous stage
  kSendBackward,  // dL/d(input) to the previous stage
  kRecvBackward,  // dL/d(output) from the next stage
};

// "F", "I", "W", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B".
std::string_view op_name(Op op);
bool is_compute(Op op);
bool is_receive(Op op);

// `op` on `stage` for the micro-batches [micro_batch, micro_batch + count).
struct Instruction {
  Op op = Op::kForward;
  int stage = 0;
  int micro_batch = 0;
  int count = 1;

  bool operator==(const Instruction&) const = default;
};

// "3", or "1.2" with slices.
std::string micro_batch_name(int micro_batch, int slices);
// "0F3"; a range is "0W0-3". With slices, "0F1.2" is slice 2 of micro-batch 1.
std::string to_string(const Instruction& instruction, int slices = 1);

// The time when W runs; see apply_p2_policy.
enum class P2Policy : uint8_t { kOff, kEnd, kCooldown, kFill, kPlaced };
std::string_view policy_name(P2Policy policy);
// Throws Error, which suggests the nearest policy.
P2Policy parse_policy(std::string_view name);
std::vector<std::string> policy_names();

// The order in which a rank runs the W that is left after its last I. Any order leaves the same bits.
enum class P2Order : uint8_t {
  kOldest,  // as queued: one micro-batch after another
  kBucket,  // layer by layer, the last first, each for all its micro-batches. Gradients are thus complete one layer
            // after another, and their sums over data-parallel replicas run next to the W of other layers. The first
            // stage, whose dL/dx no rank needs, does so within its last I. With
            // replicas, earlier waits prefer W of a stage that has no more I.
};

// The causes of a rank's idle time. The executor and the simulation report the same ones.
enum class IdleCause : int {
  kStartUp,  // before its first F of the step
  kMessage,  // waiting for a message while W was pending (policies that do not fill)
  kNothing,  // waiting for a message with no W left to fill
  kExperts,  // waiting for tokens of experts (pipeline.experts)
  kTail,     // finished, while other ranks were not
};
inline constexpr int kIdleCauses = 5;
std::string_view idle_cause_name(IdleCause cause);  // "start-up", "message", "nothing to fill", "experts", "tail"

struct Schedule {
  std::string name;  // "1f1b", for error messages
  P2Policy policy = P2Policy::kOff;
  int stages = 1;
  int micro_batches = 1;
  // With k > 1, each micro-batch is cut along its sequence into k slices, which follow each other like micro-batches
  // (Seq1F1B, arXiv 2406.03488). `micro_batches` and all instructions then count slices: number m k + s is slice s of
  // micro-batch m. F runs in this order. I and W run the slices of a micro-batch last to first, because a slice's
  // gradient needs those of the later slices, which read its keys and values.
  int slices = 1;
  int frozen = 0;                               // the first stages, which have F alone: nothing in them is trained
  std::vector<int> rank_of_stage;               // placement; a rank owns any number of stages
  std::vector<std::vector<Instruction>> ranks;  // the instructions of each rank, in order
  // Gives up micro-batch order within F, I and W of a stage, and with it bitwise equality.
  bool allow_reorder = false;

  int rank_count() const { return static_cast<int>(ranks.size()); }
  // Whether the stage has no previous or no next stage.
  bool is_first(int stage) const { return stage == 0; }
  bool is_last(int stage) const { return stage + 1 == stages; }
  // Whether the previous stage needs the gradient of this one's input.
  bool gives_gradient(int stage) const { return stage > frozen; }
  bool has(Op op) const;
  // False for an evaluation.
  bool has_backward() const { return has(Op::kBackwardP1) || has(Op::kBackwardP2) || has(Op::kBackward); }
  // "4 micro-batches", or "4 micro-batches of 8 slices".
  std::string count_text() const;
  // The micro-batch whose I and W a stage runs in this place, counted from 0; or the place of a micro-batch.
  int backward_order(int place) const { return place / slices * slices + (slices - 1 - place % slices); }
  // With `fill`, a rank that waits for a message runs pending W.
  bool fills() const { return policy == P2Policy::kFill; }
  // Whether the policy is the only reason why W waits.
  bool holds_p2_back() const { return policy == P2Policy::kEnd || policy == P2Policy::kCooldown; }

  bool operator==(const Schedule&) const = default;
};

}  // namespace twobp
