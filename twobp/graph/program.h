// The programs of a captured module, as graph.json has them (docs/bundle.md): what forward, evaluation, backward-p1 and
// each unit of backward-p2 call, in order. A slot is a value of one micro-batch.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include "twobp/graph/operators.h"

namespace twobp::graph {

inline constexpr int64_t kAnySize = -1;

struct TensorType {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;

  auto operator<=>(const TensorType&) const = default;
  bool fits(const at::Tensor& tensor) const {
    return tensor.scalar_type() == dtype && tensor.sizes() == at::IntArrayRef(sizes);
  }
};

// The fields of a micro-batch by name.
using FieldTypes = std::map<std::string, TensorType>;

// A whole number of an argument that depends on the positions that a call computes: all of a sequence, or a slice
// (Context::slice).
struct OfPositions {
  enum class What : uint8_t {
    kCount,  // `times` the number of positions
    kBegin,  // the first one in its sequence
    kEnd,    // one past the last
  };
  What what = What::kCount;
  int64_t times = 1;
  size_t index = 0;  // in the list, if the argument is one

  int64_t value(int64_t begin, int64_t length) const {
    if (what == What::kCount) return times * length;
    return what == What::kBegin ? begin : begin + length;
  }
};

// A number of an argument that depends on the sizes of the micro-batch's fields (sizes.h).
struct OfSizes {
  size_t entry = 0;   // of the shape's Sizes
  bool whole = true;  // the argument takes no real number
  size_t index = 0;   // in the list, if the argument is one
};

struct Argument {
  enum class Kind : uint8_t {
    kValue,         // `value`
    kSlot,          // the tensor in `slot`
    kTensors,       // a list of the tensors in `slots`
    kMaybeTensors,  // the same, where -1 is no tensor
    kRandom,        // random numbers of their own, told apart by `slot`
    kDevice,        // the rank's device
  };
  Kind kind = Kind::kValue;
  bool last = false;  // kSlot: no later instruction reads the tensor, so it is moved
  int slot = -1;
  std::vector<int> slots;
  c10::IValue value;                      // for whole sequences
  std::vector<OfPositions> of_positions;  // what is another number for a slice
  std::vector<OfSizes> of_sizes;          // what is another number for other sizes of the fields
};

struct Instruction {
  enum class Kind : uint8_t {
    kCall,       // `out` = op(arguments)
    kProduct,    // gradient of `parameter` += a @ b
    kSum,        // gradient of `parameter` += value
    kGroups,     // gradient of `parameter`, a matrix for each group of rows (own_operators.h) += a^T @ b
    kEmbedding,  // gradient of `parameter`: row ids[i] += dy[i], but not for ids of padding
    kNothing,    // gradient of `parameter` += 0: no gradient reaches this use
  };
  Kind kind = Kind::kCall;
  const Operator* op = nullptr;
  int parameter = -1;
  std::vector<Argument> arguments;
  std::vector<int> out;     // -1: no instruction reads this result
  bool list = false;        // the results are the elements of one list
  int8_t over = -1;         // the result may take the memory of this argument; -1: of none
  int attention = -1;       // the number of this call of attention in its program, or of its derivative
  std::vector<int> unread;  // slots that no later instruction reads, apart from arguments that are moved
  std::string place;        // "forward[12], aten::addmm", for messages
};

using Code = std::vector<Instruction>;

// Calls visit(slot) for every slot that the instruction reads, once for each time.
template <typename Visit>
void for_each_read(const Instruction& instruction, Visit&& visit) {
  for (const Argument& argument : instruction.arguments) {
    if (argument.kind == Argument::Kind::kSlot) visit(argument.slot);
    for (const int slot : argument.slots) {
      if (slot >= 0) visit(slot);
    }
  }
}

// A value that is there before the code runs.
struct Input {
  enum class From : uint8_t { kValue, kField, kParameter, kBuffer, kConstant, kLossWeight };
  From from = From::kValue;
  int index = 0;       // of the previous layer's output, or in the layer's list
  std::string field;   // its name, or that of a constant that a table reads
  bool whole = false;  // of the field: all positions, for a slice too
  int slot = 0;
};

struct Program {
  struct Output {
    int slot = 0;
    int gradient = -1;  // the slot of dL/d(output); -1: it has none
  };
  struct At {
    int index = 0;
    int slot = 0;
  };
  struct Unit {
    std::string name;
    Code code;
  };

  int slots = 0;
  std::vector<Input> inputs;
  std::vector<Output> outputs;
  std::vector<At> new_buffers;
  Code forward;
  Code evaluate;
  Code backward_p1;
  std::vector<At> input_gradients;
  std::vector<Unit> backward_p2;
  int attentions = 0;  // calls of attention in forward
};

// Computes a constant of the programs from other constants and from sizes: positions, rotary tables, masks.
struct Table {
  int slots = 0;
  int slot = 0;
  std::vector<Input> inputs;
  Code code;
};

// Counts the targets of a micro-batch.
struct Targets {
  // What capture took from its example. The fields of each micro-batch must satisfy it.
  struct Check {
    int slot = 0;  // a bool
    std::string says;
  };
  int64_t count = -1;       // the same for every micro-batch of the shape; -1: `code` computes it into `slot`
  int count_of_sizes = -1;  // the entry of the shape's Sizes that is the count; -1: none
  std::vector<Check> checks;
  int slots = 0;
  int slot = 0;
  std::vector<Input> inputs;
  Code code;
};

}  // namespace twobp::graph
