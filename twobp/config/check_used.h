// A key that nothing reads would change nothing, so it is an error to set it.
#pragma once

#include "twobp/core/check.h"

namespace twobp {

// Throws Error if the key's value is not its default although it is not `used`. `users`: the keys and values with which
// it is read, "optimizer.type \"sgd\"".
template <typename T>
void check_used(bool used, const char* key, const T& value, const T& unset, const char* users) {
  TWOBP_CHECK(used || value == unset, key, " is ", value, ", but only ", users, " uses it: remove it, or set it to ",
              unset, ".");
}

}  // namespace twobp
