#include "twobp/nn/layers/documents.h"

#include "twobp/core/check.h"

namespace twobp {

std::shared_ptr<const DocumentPlaces> documents_of(const Context& context, int64_t batch, int64_t positions) {
  if (context.fields == nullptr) return {};
  const auto found = context.fields->find(kDocumentStarts);
  if (found == context.fields->end()) return {};
  TWOBP_CHECK(found->second.scalar_type() == at::kLong && found->second.dim() == 2 && found->second.size(0) == batch &&
                  found->second.size(1) == positions,
              kDocumentStarts, " must be int64 (", batch, ", ", positions, "), got ",
              c10::toString(found->second.scalar_type()), " ", found->second.sizes());
  if (context.documents != nullptr && *context.documents) return *context.documents;
  const at::Tensor starts = found->second.cpu().contiguous();
  const int64_t* const all = starts.const_data_ptr<int64_t>();
  for (int64_t sample = 0; sample < batch; ++sample) {
    int64_t before = 0;
    for (int64_t i = 0; i < positions; ++i) {
      const int64_t start = all[sample * positions + i];
      const int64_t position = context.past + i;
      TWOBP_CHECK(start >= before && start <= position, kDocumentStarts, " of sample ", sample, " is ", start,
                  " at position ", position, ": it must be from ", before, " (its value at the position before) to ",
                  position, " (the position itself)");
      before = start;
    }
  }
  auto documents = std::make_shared<const DocumentPlaces>(starts);
  if (context.documents != nullptr) *context.documents = documents;
  return documents;
}

}  // namespace twobp
