// Works out, for the program of a layer, when each value is read last: what is kept from forward until backward-p1 and
// until each unit of backward-p2, what is freed after an instruction, and which arguments are moved, so that an
// operator may overwrite them. Work that serves only frozen parameters is left out.
#pragma once

#include <vector>

#include "twobp/graph/program.h"

namespace twobp::graph {

// One run of a code: what it reads at the begin, and what is left at the end.
struct Pass {
  std::vector<Input> inputs;
  Code code;
};

struct Plan {
  struct Unit {
    int index = 0;  // in Program::backward_p2
    Pass pass;
    std::vector<int> from_forward;  // slots that forward keeps for the unit
    std::vector<int> from_p1;       // slots that backward-p1 keeps for the unit
  };

  const Program* program = nullptr;
  Pass forward;        // keeps what the backward pass needs
  Pass forward_alone;  // of a layer without a backward pass
  Pass evaluate;
  std::vector<int> until_p1;    // slots that forward keeps for backward-p1
  std::vector<bool> gradients;  // by output with a gradient: whether dL/d(output) is read
  Pass backward_p1;
  std::vector<Unit> units;  // those that have work
};

// `trained`: by parameter of the layer.
Plan make_plan(const Program& program, const std::vector<bool>& trained);

// The pass of a code that is needed for the slots `wanted` alone.
Pass make_pass(const std::vector<Input>& inputs, const Code& code, const std::vector<int>& wanted);

}  // namespace twobp::graph
