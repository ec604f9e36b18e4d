#include "twobp/pipeline/profile/profile_exchange.h"

#include <tuple>

#include "twobp/core/check.h"

namespace twobp {
namespace {

// The numbers of a measured cost. They travel as doubles.
auto fields(LayerCost& cost) {
  return std::tie(cost.forward, cost.backward_p1, cost.backward_p2, cost.p2_units, cost.forward_peak,
                  cost.forward_held, cost.p1_peak, cost.p1_held, cost.stash, cost.p2_peak, cost.output,
                  cost.input_gradient);
}
constexpr int64_t kFields = std::tuple_size_v<decltype(fields(std::declval<LayerCost&>()))>;

}  // namespace

at::Tensor pack_profile(const Profile& profile) {
  at::Tensor packed = at::empty({static_cast<int64_t>(profile.size()), kFields}, at::kDouble);
  auto* to = packed.mutable_data_ptr<double>();
  for (const auto& [kind, measured] : profile) {
    LayerCost cost = measured;
    std::apply([&](auto&... field) { ((*to++ = static_cast<double>(field)), ...); }, fields(cost));
  }
  return packed;
}

void unpack_profile(const at::Tensor& packed, Profile& profile) {
  TWOBP_CHECK(packed.dim() == 2 && packed.size(0) == static_cast<int64_t>(profile.size()) &&
                  packed.size(1) == kFields && packed.scalar_type() == at::kDouble,
              "received a profile of sizes ", packed.sizes(), ", but expected ", profile.size(),
              " kinds of layers with ", kFields,
              " numbers each: the processes run different models or programs");
  const at::Tensor dense = packed.contiguous();
  const auto* from = dense.const_data_ptr<double>();
  for (auto& [kind, cost] : profile) {
    std::apply(
        [&](auto&... field) {
          ((field = static_cast<std::remove_reference_t<decltype(field)>>(*from++)), ...);
        },
        fields(cost));
  }
}

}  // namespace twobp
