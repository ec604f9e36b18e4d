// Checks the arrays in one fast pass on opening, so that reading cannot fail later.
#include "twobp/data/array_dataset.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "twobp/core/check.h"
#include "twobp/core/text.h"
#include "twobp/data/data.h"
#include "twobp/files/paths.h"
#include "twobp/nn/layers/attention_inputs.h"

namespace twobp {
namespace {

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
  TWOBP_CHECK(shape[1] == sequence, array.path(), ": shape ", shape_text(shape), ", so its sequences are ", shape[1],
              " tokens long, but data.sequence is ", sequence, ": set data.sequence to ", shape[1], ".");
}

// Calls action(row, pointer to its values) for each row.
template <typename Action>
void for_each_row(const NpyArray& array, const Action& action) {
  constexpr int64_t kBlock = 1 << 16;  // elements that are read together
  const int64_t rows = array.shape()[0];
  const int64_t columns = array.shape()[1];
  const int64_t block = std::max<int64_t>(kBlock / columns, 1);
  for (int64_t begin = 0; begin < rows; begin += block) {
    const int64_t here = std::min(block, rows - begin);
    array.visit(begin * columns, here * columns, [&](const auto* elements) {
      for (int64_t i = 0; i < here; ++i) action(begin + i, elements + i * columns);
    });
  }
}

// Throws Error at the first value that is not in [0, values). -100 is allowed too if `ignored_allowed`.
// `what` names the value in messages. `rest` says what is allowed and what to do.
void check_values(const NpyArray& array, int64_t values, bool ignored_allowed, const char* what,
                  const std::string& rest) {
  const int64_t columns = array.shape()[1];
  const auto bad = [&](auto value) {
    const auto id = static_cast<int64_t>(value);
    return static_cast<uint64_t>(id) >= static_cast<uint64_t>(values) && !(ignored_allowed && id == kIgnoredLabel);
  };
  for_each_row(array, [&](int64_t row, const auto* begin) {
    int64_t bad_values = 0;  // counted, not searched for, so that the compiler vectorizes the loop
    for (int64_t column = 0; column < columns; ++column) bad_values += bad(begin[column]) ? 1 : 0;
    if (bad_values == 0) return;
    const auto* found = std::find_if(begin, begin + columns, bad);
    fail(array.path(), ": row ", row, ", column ", found - begin, ": ", what, " ", static_cast<int64_t>(*found),
         " is outside ", rest);
  });
}

void check_ids(const NpyArray& array, int64_t vocab, bool labels) {
  check_values(
      array, vocab, labels, labels ? "label" : "token id",
      concat("the vocabulary of ", vocab, " tokens (0 to ", vocab - 1, labels ? ", or -100 for not counted)" : ")",
             ": for a new model, set model.vocab to the tokenizer's size; for model.from, use that "
             "model's tokenizer."));
}

// Whether any label counts. For a language model, column 0 does not count, because no position predicts it.
bool any_counted(const NpyArray& labels, LabelOf label_of) {
  bool any = false;
  for_each_row(labels, [&](int64_t /*row*/, const auto* values) {
    for (int64_t t = label_of == LabelOf::kNextToken ? 1 : 0; t < labels.shape()[1]; ++t)
      any = any || static_cast<int64_t>(values[t]) != kIgnoredLabel;
  });
  return any;
}

void check_attention_mask(const NpyArray& mask) {
  const int64_t columns = mask.shape()[1];
  for_each_row(mask, [&](int64_t row, const auto* begin) {
    TWOBP_CHECK(std::find_if(begin, begin + columns, [](auto v) { return v != 0; }) != begin + columns, mask.path(),
                ": row ", row, ": all are 0, so the sample has nothing but padding: remove the sample.");
  });
}

// Copies row `row` of the array to `to`.
void copy_row(const NpyArray& array, int64_t row, int64_t* to) {
  const int64_t columns = array.shape()[1];
  array.visit(row * columns, columns, [&](const auto* values) { std::copy_n(values, columns, to); });
}

// A label at padding is most often a mistake, and its loss would come from a token that is none.
void check_labels_of_padding(const NpyArray& mask, const NpyArray& labels) {
  const int64_t columns = mask.shape()[1];
  std::vector<int64_t> label(static_cast<size_t>(columns));
  for_each_row(mask, [&](int64_t row, const auto* seen) {
    copy_row(labels, row, label.data());
    for (int64_t column = 0; column < columns; ++column) {
      const int64_t here = label[static_cast<size_t>(column)];
      TWOBP_CHECK(seen[column] != 0 || here == kIgnoredLabel, labels.path(), ": row ", row, ", column ", column,
                  ": label ", here,
                  " at a position that attention_mask.npy says is padding: set the labels of padding to "
                  "-100.");
    }
  });
}

void check_document_starts(const NpyArray& starts) {
  const int64_t columns = starts.shape()[1];
  for_each_row(starts, [&](int64_t row, const auto* begin) {
    for (int64_t column = 0; column < columns; ++column) {
      const auto start = static_cast<int64_t>(begin[column]);
      TWOBP_CHECK(start == column || (column > 0 && start == static_cast<int64_t>(begin[column - 1])), starts.path(),
                  ": row ", row, ", column ", column, ": the document begins at ", start,
                  ", but must begin here, or where that of the column before does.");
    }
  });
}

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

ArrayDataset::ArrayDataset(const std::string& folder, int64_t sequence, int64_t vocab, LabelOf label_of,
                           int64_t token_types, bool documents)
    : input_(open_array(folder, "input_ids.npy")), labels_(open_array(folder, "labels.npy")), label_of_(label_of) {
  check_shape(input_, sequence);
  check_shape(labels_, sequence);
  TWOBP_CHECK(labels_.shape() == input_.shape(), labels_.path(), ": shape ", shape_text(labels_.shape()),
              ", but input_ids.npy has ", shape_text(input_.shape()), ": every token needs a label.");
  check_ids(input_, vocab, /*labels=*/false);
  check_ids(labels_, vocab, /*labels=*/true);
  TWOBP_CHECK(any_counted(labels_, label_of), labels_.path(), ": no label is counted: all are -100",
              label_of == LabelOf::kNextToken ? ", or in column 0, which no position predicts." : ".");
  std::optional<NpyArray> mask =
      open_optional(folder, "attention_mask", 2, "the mask", "0 (padding) and 1 (seen): correct the mask.");
  if (mask) check_attention_mask(*mask);
  if (mask && label_of == LabelOf::kNextToken) check_labels_of_padding(*mask, labels_);
  if (mask) optional_.emplace("attention_mask", std::move(*mask));
  if (label_of == LabelOf::kNextToken) {
    std::vector<std::string> names = {"input_ids", "labels", "attention_mask"};
    if (documents) {
      names.emplace_back(kDocumentStarts);
      std::optional<NpyArray> starts =
          open_optional(folder, kDocumentStarts, sequence, "the place of a document's begin",
                        "the positions of a sample: correct the file.");
      if (starts) check_document_starts(*starts);
      if (starts) optional_.emplace(kDocumentStarts, std::move(*starts));
    }
    refuse_other_arrays(folder, names, "a language model");
    return;
  }
  std::optional<NpyArray> types =
      open_optional(folder, "token_type_ids", token_types, "token type",
                    "model.token_types: set that to the largest one plus 1, or correct the data.");
  if (types) optional_.emplace("token_type_ids", std::move(*types));
  refuse_other_arrays(folder, {"input_ids", "labels", "attention_mask", "token_type_ids"}, "a masked language model");
}

std::optional<NpyArray> ArrayDataset::open_optional(const std::string& folder, const std::string& name, int64_t values,
                                                    const char* what, const char* remedy) const {
  std::error_code ignored;
  // A link to a file that is gone is an error, not a file that was left out.
  const auto status = std::filesystem::symlink_status(folder + "/" + name + ".npy", ignored);
  if (!std::filesystem::exists(status)) return std::nullopt;
  NpyArray array = open_array(folder, (name + ".npy").c_str());
  TWOBP_CHECK(array.type() != NpyType::kFloat32, array.path(), ": holds float32, but ", what,
              " is an integer: save it as uint8 or int64.");
  TWOBP_CHECK(array.shape() == input_.shape(), array.path(), ": shape ", shape_text(array.shape()),
              ", but input_ids.npy has ", shape_text(input_.shape()), ": every token needs a value.");
  check_values(array, values, /*ignored_allowed=*/false, what, remedy);
  return array;
}

void refuse_other_arrays(const std::string& folder, const std::vector<std::string>& read,
                         const std::string& model_type) {
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::filesystem::path& path = entry.path();
    const std::string extension = lower_extension(path);
    if (extension != ".npy" && extension != ".npz") continue;
    const bool is_read =
        path.extension() == ".npy" && std::find(read.begin(), read.end(), path.stem().string()) != read.end();
    TWOBP_CHECK(is_read, path.string(), ": ", model_type, " does not read this array, only ", join(read, ".npy, "),
                ".npy: move it out of the folder that data.arrays names.");
  }
}

Fields ArrayDataset::read(const std::vector<int64_t>& indices, int64_t /*epoch*/) const {
  const auto count = static_cast<int64_t>(indices.size());
  const int64_t sequence = input_.shape()[1];
  const auto rows = [&] { return at::empty({count, sequence}, at::kLong); };  // (B, S)
  Fields fields{{"input_ids", rows()}, {"labels", rows()}};
  for (const auto& [name, array] : optional_) fields.emplace(name, rows());
  for (int64_t b = 0; b < count; ++b) {
    const int64_t index = indices[static_cast<size_t>(b)];
    TWOBP_CHECK(index >= 0 && index < size(), input_.path(), ": no sample ", index, ", there are ", size(), ".");
    const auto row = [&](const std::string& name) { return fields.at(name).data_ptr<int64_t>() + b * sequence; };
    copy_row(input_, index, row("input_ids"));
    copy_row(labels_, index, row("labels"));
    for (const auto& [name, array] : optional_) copy_row(array, index, row(name));
  }
  if (label_of_ == LabelOf::kNextToken) return to_predicting_positions(std::move(fields));
  return fields;
}

int64_t ArrayDataset::cost(int64_t sample) const {
  const auto starts = optional_.find(kDocumentStarts);
  if (starts == optional_.end()) return 0;
  std::vector<int64_t> begins(static_cast<size_t>(input_.shape()[1]));
  copy_row(starts->second, sample, begins.data());
  // Twice the pairs of a position and an earlier one, and the positions: the sum of the documents' squares.
  int64_t pairs = 0;
  for (size_t at = 0; at < begins.size(); ++at) pairs += static_cast<int64_t>(at) - begins[at];
  return 2 * pairs + static_cast<int64_t>(begins.size());
}

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

Fields to_predicting_positions(Fields fields) {
  const auto found = fields.find("labels");
  if (found == fields.end()) return fields;
  at::Tensor& labels = found->second;
  TWOBP_CHECK(labels.dim() == 2 && labels.size(1) > 0, "labels have shape ", labels.sizes(),
              ", but must be (samples, positions): the token ids, or -100 where a token does not count");
  const int64_t others = labels.size(1) - 1;
  at::Tensor following = labels.narrow(1, 1, others);
  if (const auto starts = fields.find(kDocumentStarts); starts != fields.end()) {
    TWOBP_CHECK(starts->second.sizes() == labels.sizes(), kDocumentStarts, " has shape ", starts->second.sizes(),
                ", but labels have ", labels.sizes());
    const at::Tensor positions = at::arange(1, labels.size(1), starts->second.options());
    following = following.masked_fill(starts->second.narrow(1, 1, others).eq(positions), kIgnoredLabel);
  }
  labels = at::constant_pad_nd(following, {0, 1}, kIgnoredLabel);
  return fields;
}

}  // namespace twobp
