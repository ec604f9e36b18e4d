#include <algorithm>
#include <limits>
#include <vector>

#include "twobp/core/check.h"
#include "twobp/nn/kernels/attention/packed_attention.h"
#include "twobp/nn/values.h"

namespace twobp {
namespace {

// The positions of a document that stands for several of one position each: a block of a kernel. Longer ones would take
// more time, as attention multiplies all pairs of them.
constexpr int64_t kMostAlone = 128;

}  // namespace

DocumentPlaces::DocumentPlaces(const at::Tensor& starts) : starts_(starts.contiguous()) {
  TWOBP_CHECK(starts.is_cpu() && starts.dim() == 2 && starts.scalar_type() == at::kLong,
              "the starts of documents are int64 (batch, positions) on the host, not ", starts.sizes(), " ",
              c10::toString(starts.scalar_type()));
}

const at::Tensor& DocumentPlaces::starts_on(at::Device device) const {
  if (device.is_cpu()) return starts_;
  if (!on_device_.defined() || on_device_.device() != device) on_device_ = on_device(starts_, device);
  return on_device_;
}

const DocumentRows& DocumentPlaces::rows_on(at::Device device) const {
  if (rows_ && rows_->bounds.device() == device) return *rows_;
  const int64_t batch = starts_.size(0), positions = starts_.size(1);
  TWOBP_CHECK(batch * positions <= std::numeric_limits<int32_t>::max(), "a batch of ", batch, " samples of ", positions,
              " positions has too many for the kernels of documents");
  const int64_t* const starts = starts_.const_data_ptr<int64_t>();
  std::vector<int32_t> bounds;
  std::vector<int64_t> alone;
  DocumentRows rows;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t* const of = starts + b * positions;
    int64_t end = 0;
    for (int64_t i = 0; i < positions; i = end) {
      for (end = i + 1; end < positions && of[end] != end;) ++end;
      if (end == i + 1) {  // as many neighbours like it as there are
        while (end < positions && end - i < kMostAlone && (end + 1 == positions || of[end + 1] == end + 1)) ++end;
        for (int64_t one = i; end - i > 1 && one < end; ++one) alone.push_back(b * positions + one);
      }
      bounds.push_back(static_cast<int32_t>(b * positions + i));
      rows.longest = std::max(rows.longest, end - i);
    }
  }
  bounds.push_back(static_cast<int32_t>(batch * positions));
  rows.bounds = on_device(at::tensor(bounds, at::kInt), device);
  if (!alone.empty()) {
    const at::Tensor which = at::zeros({batch, positions}, at::kBool);
    for (const int64_t one : alone) which.mutable_data_ptr<bool>()[one] = true;
    rows.alone = on_device(which, device);
  }
  rows_ = std::move(rows);
  return *rows_;
}

}  // namespace twobp
