#include "twobp/pipeline/profile/profile_exchange.h"

#include "twobp/core/check.h"

namespace twobp {
namespace {

// The numbers of a measured cost, and p2_units. They travel as doubles.
constexpr int64_t kFields = kLayerNumbers.size() + 1;

}  // namespace

at::Tensor pack_profile(const Profile& profile) {
  at::Tensor packed = at::empty({static_cast<int64_t>(profile.size()), kFields}, at::kDouble);
  auto* to = packed.mutable_data_ptr<double>();
  for (const auto& [kind, measured] : profile) {
    for (const auto number : kLayerNumbers) *to++ = measured.*number;
    *to++ = measured.p2_units;
  }
  return packed;
}

void unpack_profile(const at::Tensor& packed, Profile& profile) {
  TWOBP_CHECK(packed.dim() == 2 && packed.size(0) == static_cast<int64_t>(profile.size()) &&
                  packed.size(1) == kFields && packed.scalar_type() == at::kDouble,
              "received a profile of sizes ", packed.sizes(), ", but expected ", profile.size(),
              " kinds of layers with ", kFields, " numbers each: the processes run different models or programs");
  const at::Tensor dense = packed.contiguous();
  const auto* from = dense.const_data_ptr<double>();
  for (auto& [kind, cost] : profile) {
    for (const auto number : kLayerNumbers) cost.*number = *from++;
    cost.p2_units = static_cast<int>(*from++);
  }
}

}  // namespace twobp
