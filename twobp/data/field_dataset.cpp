#include "twobp/data/field_dataset.h"

#include <algorithm>

#include "twobp/core/check.h"
#include "twobp/data/array_dataset.h"

namespace twobp {
namespace {

std::vector<int64_t> sample_sizes(const std::vector<int64_t>& sizes) {
  return {sizes.begin() + 1, sizes.end()};
}

void check_array(const NpyArray& array, const FieldInput& field, int64_t samples) {
  const auto& shape = array.shape();
  TWOBP_CHECK(!shape.empty() && sample_sizes(shape) == sample_sizes(field.sizes), array.path(), ": shape ",
              shape_text(shape), ", but field \"", field.name, "\" of the captured model is ", shape_text(field.sizes),
              " for a micro-batch: give (samples, the same sizes after the first).");
  TWOBP_CHECK(shape[0] > 0 && shape[0] == samples, array.path(), ": has ", shape[0], " samples",
              shape[0] == samples ? ": give some." : concat(", but another array has ", samples, "."));
  TWOBP_CHECK(array.type() != NpyType::kFloat32 || at::isFloatingType(field.dtype), array.path(),
              ": holds float32, but field \"", field.name, "\" is of ", field.dtype, ": save it as whole numbers.");
}

}  // namespace

FieldDataset::FieldDataset(const std::string& folder, const std::vector<FieldInput>& fields) {
  std::vector<std::string> names;
  for (const FieldInput& field : fields) {
    TWOBP_CHECK(!field.sizes.empty() && field.sizes[0] == fields[0].sizes[0], "data.arrays: field \"", field.name,
                "\" of the captured model has no dimension of samples as the others have: train ", "it from Python.");
    names.push_back(field.name);
    arrays_.emplace_back(field, NpyArray(folder + "/" + field.name + ".npy"));
    check_array(arrays_.back().second, field, arrays_.front().second.shape().empty() ? 0 : size());
  }
  TWOBP_CHECK(!arrays_.empty(), "data.arrays: the captured model has no field.");
  refuse_other_arrays(folder, names, "the captured model");
}

Fields FieldDataset::read(const std::vector<int64_t>& indices, int64_t /*epoch*/) const {
  Fields fields;
  for (const auto& [field, array] : arrays_) {
    std::vector<int64_t> sizes = field.sizes;
    sizes[0] = static_cast<int64_t>(indices.size());
    const int64_t elements = array.elements() / size();
    at::Tensor stacked = at::empty(sizes, field.dtype);
    for (size_t i = 0; i < indices.size(); ++i) {
      TWOBP_CHECK(indices[i] >= 0 && indices[i] < size(), array.path(), ": no sample ", indices[i], ", there are ",
                  size(), ".");
      at::Tensor sample = stacked.select(0, static_cast<int64_t>(i));
      array.visit(indices[i] * elements, elements, [&](const auto* values) {
        using T = std::remove_cvref_t<decltype(*values)>;
        // LibTorch has no operators for uint16.
        using Read = std::conditional_t<std::is_same_v<T, uint16_t>, int32_t, T>;
        at::Tensor read = at::empty(sample.sizes(), c10::CppTypeToScalarType<Read>::value);
        std::copy_n(values, elements, read.template mutable_data_ptr<Read>());
        sample.copy_(read);
      });
    }
    fields.emplace(field.name, std::move(stacked));
  }
  return fields;
}

Fields UnshiftedLabels::read(const std::vector<int64_t>& indices, int64_t epoch) const {
  Fields fields = tokens_->read(indices, epoch);
  const at::Tensor& shifted = fields.at("labels");
  const at::Tensor first = fields.at("input_ids").narrow(1, 0, 1);  // nothing predicts it
  fields["labels"] = at::cat({first, shifted.narrow(1, 0, shifted.size(1) - 1)}, 1);
  return fields;
}

bool are_tokens(const std::vector<FieldInput>& fields) {
  return fields.size() == 2 && fields[0].name == "input_ids" && fields[1].name == "labels" &&
         fields[0].sizes == fields[1].sizes && fields[0].sizes.size() == 2 && fields[0].dtype == at::kLong &&
         fields[1].dtype == at::kLong;
}

}  // namespace twobp
