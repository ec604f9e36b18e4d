// A model's options with the dtype that a test builds it in.
#pragma once

#include "twobp/models/model_type.h"

namespace twobp::test {

template <typename Options>
struct Typed : Options {
  at::ScalarType dtype = at::kFloat;

  BuildSettings settings() const { return {dtype, {}}; }
};

}  // namespace twobp::test
