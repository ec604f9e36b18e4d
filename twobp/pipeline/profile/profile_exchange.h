// A profile as a message: one process measures it for all.
#pragma once

#include <ATen/ATen.h>

#include "twobp/pipeline/profile/profile.h"

namespace twobp {

// A row of numbers for each kind of layer, in the order of their names.
at::Tensor pack_profile(const Profile& profile);
// Into a profile of the same kinds. Throws Error if there are not as many.
void unpack_profile(const at::Tensor& packed, Profile& profile);

}  // namespace twobp
