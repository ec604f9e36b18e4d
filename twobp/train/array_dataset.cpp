// Checks both arrays in one fast pass when they are opened, so that reading cannot fail later.
#include "twobp/train/array_dataset.h"

#include <algorithm>
#include <utility>

#include "twobp/core/check.h"

namespace twobp {
namespace {

constexpr int64_t kIgnored = -100;

NpyArray open_array(const std::string& folder, const char* name) {
  return NpyArray(folder + "/" + name);
}

void check_shape(const NpyArray& array, int64_t sequence) {
  const auto& shape = array.shape();
  TWOBP_CHECK(array.type() != NpyType::kFloat32, array.path(),
              ": holds float32, but token ids are integers: save it as uint16, int32 or int64.");
  TWOBP_CHECK(shape.size() == 2, array.path(), ": shape ", shape_text(shape),
              ", but two dimensions are expected: (samples, data.sequence).");
  TWOBP_CHECK(shape[0] > 0, array.path(), ": shape ", shape_text(shape), ": there is no sample in it.");
  TWOBP_CHECK(shape[1] == sequence, array.path(), ": shape ", shape_text(shape), ", so its sequences are ",
              shape[1], " tokens long, but data.sequence is ", sequence, ": set data.sequence to ", shape[1],
              ".");
}

// Fails at the first value that is neither in [0, vocab) nor, if that is allowed, -100.
void check_values(const NpyArray& array, int64_t vocab, bool ignored_allowed) {
  const int64_t columns = array.shape()[1];
  const auto bad = [&](auto value) {
    const auto id = static_cast<int64_t>(value);
    return static_cast<uint64_t>(id) >= static_cast<uint64_t>(vocab) && !(ignored_allowed && id == kIgnored);
  };
  array.visit([&](const auto* values) {
    for (int64_t row = 0; row < array.shape()[0]; ++row) {
      const auto* begin = values + row * columns;
      int64_t bad_values = 0;  // counted, not searched for: the compiler vectorizes this loop
      for (int64_t column = 0; column < columns; ++column) bad_values += bad(begin[column]) ? 1 : 0;
      if (bad_values == 0) continue;
      const auto* found = std::find_if(begin, begin + columns, bad);
      fail(array.path(), ": row ", row, ", column ", found - begin, ": ",
           ignored_allowed ? "label " : "token id ", static_cast<int64_t>(*found),
           " is outside the vocabulary of ", vocab, " tokens (0 to ", vocab - 1,
           ignored_allowed ? ", or -100 for not counted)" : ")",
           ": set model.vocab to the tokenizer's size, or mend the data.");
    }
  });
}

// Whether any label counts; those of column 0 have no position that predicts them.
bool any_counted(const NpyArray& labels) {
  const int64_t columns = labels.shape()[1];
  return labels.visit([&](const auto* values) {
    for (int64_t i = 0; i < labels.elements(); ++i) {
      if (i % columns != 0 && static_cast<int64_t>(values[i]) != kIgnored) return true;
    }
    return false;
  });
}

}  // namespace

ArrayDataset::ArrayDataset(const std::string& folder, int64_t sequence, int64_t vocab)
    : input_(open_array(folder, "input_ids.npy")), labels_(open_array(folder, "labels.npy")) {
  check_shape(input_, sequence);
  check_shape(labels_, sequence);
  TWOBP_CHECK(labels_.shape() == input_.shape(), labels_.path(), ": shape ", shape_text(labels_.shape()),
              ", but input_ids.npy has ", shape_text(input_.shape()), ": every token needs a label.");
  check_values(input_, vocab, /*ignored_allowed=*/false);
  check_values(labels_, vocab, /*ignored_allowed=*/true);
  TWOBP_CHECK(any_counted(labels_), labels_.path(),
              ": no label is counted: all are -100, or in column 0, which no position predicts.");
}

Fields ArrayDataset::read(const std::vector<int64_t>& indices) const {
  const auto count = static_cast<int64_t>(indices.size());
  const int64_t sequence = input_.shape()[1];
  at::Tensor input = at::empty({count, sequence}, at::kLong);   // (B, S)
  at::Tensor labels = at::empty({count, sequence}, at::kLong);  // (B, S)
  for (int64_t b = 0; b < count; ++b) {
    const int64_t index = indices[static_cast<size_t>(b)];
    TWOBP_CHECK(index >= 0 && index < size(), input_.path(), ": no sample ", index, ", there are ", size(),
                ".");
    input_.visit([&](const auto* values) {
      std::copy_n(values + index * sequence, sequence, input.data_ptr<int64_t>() + b * sequence);
    });
    labels_.visit([&](const auto* values) {
      int64_t* to = labels.data_ptr<int64_t>() + b * sequence;
      std::copy_n(values + index * sequence + 1, sequence - 1, to);
      to[sequence - 1] = kIgnored;
    });
  }
  return {{"input_ids", std::move(input)}, {"labels", std::move(labels)}};
}

}  // namespace twobp
