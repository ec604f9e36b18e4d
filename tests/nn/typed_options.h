// A model's options together with the dtype of the test.
#pragma once

#include "twobp/models/model_type.h"

namespace twobp::test {

template <typename Options>
struct Typed : Options {
  at::ScalarType dtype = at::kFloat;

  BuildSettings settings() const { return {dtype, {}}; }
};

}  // namespace twobp::test
