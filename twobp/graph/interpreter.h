// Runs the code of a captured program: boxed calls of operators that were looked up before. The calling thread must
// skip autograd (at::AutoDispatchBelowADInplaceOrView), as rank threads do.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "twobp/graph/program.h"
#include "twobp/nn/parameter.h"

namespace twobp::graph {

// The values of one run. The memory of the table is the thread's own and is used again, so a thread has one frame at a
// time.
class Frame {
 public:
  explicit Frame(int slots);
  ~Frame();
  Frame(const Frame&) = delete;
  Frame& operator=(const Frame&) = delete;

  void put(int slot, at::Tensor tensor);
  // The tensor in a slot. Throws Error if there is none.
  const at::Tensor& tensor(int slot) const;
  std::vector<c10::IValue>& slots() { return slots_; }

 private:
  std::vector<c10::IValue>& slots_;
  size_t count_;
};

// What the code of one run takes besides the values of its frame.
struct CallContext {
  std::span<Parameter* const> parameters;  // those that the code adds gradients to
  uint64_t random = 0;                     // differs between micro-batches and layers
  at::Device device = at::kCPU;
  // Set if the code runs over a slice. `saved` is then the layer's, whose children from number `attentions` on are
  // those of its calls of attention.
  std::optional<SliceCall> slice{};
  size_t attentions = 0;
};

// Throws Error that names the instruction.
void run(const Code& code, Frame& frame, const CallContext& call_context);

}  // namespace twobp::graph
