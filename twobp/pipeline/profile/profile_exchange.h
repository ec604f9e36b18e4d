// A profile as a message. One process measures it for all.
#pragma once

#include <ATen/ATen.h>

#include "twobp/pipeline/profile/profile.h"

namespace twobp {

// One row of numbers for each kind of layer, in the order of their names.
at::Tensor pack_profile(const Profile& profile);
// Unpacks into a profile of the same kinds. Throws Error if their number differs.
void unpack_profile(const at::Tensor& packed, Profile& profile);

}  // namespace twobp
