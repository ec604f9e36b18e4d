// The operators that a captured program may call: a list of ATen's functional operators, and our own. None reaches
// files, processes or other memory than its arguments', whatever these are.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include "twobp/graph/arguments.h"
#include "twobp/nn/saved.h"

namespace twobp::graph {

// A slice of the sequences (Context::slice), for operators that treat slices in a special way.
struct SliceCall {
  int64_t begin = 0;
  int64_t length = 0;
  int64_t positions = 0;   // of the whole sequences
  bool keeps = true;       // a backward pass follows
  Saved* saved = nullptr;  // of this call of attention; null for other operators
};

// An operator that is looked up once. Calls take the arguments from a stack and leave the results there.
struct Operator {
  // How the result can take the memory of an argument.
  enum class InPlace : uint8_t {
    kNever,
    kSelf,    // by ATen's operator whose name ends in "_"
    kEither,  // the same, where the first two arguments may change places
    kOut,     // by passing the first argument once more, as the output
  };

  const c10::FunctionSchema* schema = nullptr;
  std::optional<c10::OperatorHandle> aten;
  void (*own)(Stack& stack) = nullptr;
  void (*of_slice)(Stack& stack, const SliceCall& slice) = nullptr;  // null: as for whole sequences
  InPlace in_place = InPlace::kNever;
  std::optional<c10::OperatorHandle> over;  // the operator that works in place
  bool masks = false;                       // its second argument is a mask of bool
  bool view = false;                        // the result mostly shares the memory of the first argument
  bool trusts_layout = false;               // ATen's kernel takes contiguous tensors only, without a check
  ArgumentCheck check = nullptr;            // of what LibTorch does not check

  void call(Stack& stack) const;
};

// The operator of this name, "aten::add.Tensor". Any thread may call it; the result lives for ever. Throws Error if it
// is not on the list, or this LibTorch does not have it.
const Operator& find_operator(const std::string& name);

}  // namespace twobp::graph
