#include "twobp/pipeline/executor/known_forms.h"

#include <algorithm>

#include "twobp/transport/message.h"

namespace twobp {
namespace {

constexpr int kMostSizes = 256;  // of a stage; messages of other sizes come with a description

}  // namespace

KnownForms::Sizes KnownForms::sizes_of(const Fields& fields) {
  Sizes sizes;
  for (const auto& [name, tensor] : fields) sizes.emplace_back(name, tensor.sizes().vec(), tensor.scalar_type());
  return sizes;
}

const Forms* KnownForms::find(MessageKind kind, int stage, const Sizes& sizes) const {
  const auto found = known_.find({kind, stage, sizes});
  return found != known_.end() && found->second ? &*found->second : nullptr;
}

void KnownForms::learn(MessageKind kind, int stage, const Sizes& sizes, const Values& values, at::DeviceType device) {
  std::optional<Forms> forms = forms_of(values);
  const auto elsewhere = [&](const at::Tensor& value) { return value.device().type() != device; };
  if (forms && std::ranges::any_of(values, elsewhere)) forms.reset();
  const auto [at, is_new] = learned_.try_emplace({kind, stage, sizes}, forms);
  if (!is_new && at->second != forms) at->second.reset();
}

void KnownForms::end_step() {
  for (auto& [key, forms] : learned_) {
    int& count = counts_[{std::get<0>(key), std::get<1>(key)}];
    if (count < kMostSizes && known_.try_emplace(key, std::move(forms)).second) ++count;
  }
  learned_.clear();
}

}  // namespace twobp
