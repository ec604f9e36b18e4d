// Calls of operators as graph.json has them, beside their tensors, and random changes of them.
#pragma once

#include <random>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <nlohmann/json.hpp>

namespace twobp::test {

// {"op", "args", "out", "list"} of an instruction, and {"tensors": [[dtype, sizes, strides, values of integers], ...]},
// the tensors in the slots from 0 on.
using Call = nlohmann::json;
using Random = std::mt19937_64;

// Changes one to three things: a number, a null, a list; a size, dtype, stride or offset of a tensor; which tensor an
// argument is. `others` are the tensors of other calls.
Call changed(Call call, const std::vector<Call>& others, Random& random);

// The tensor that the description means. Numbers are drawn. Throws if there is none.
at::Tensor make_tensor(const Call& description, Random& random);

}  // namespace twobp::test
