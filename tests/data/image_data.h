// The tests of pictures share these helpers: a folder for pictures, and the configuration that names it.
#pragma once

#include <string>
#include <vector>

#include "tests/train/helpers.h"
#include "twobp/data/images/open_images.h"

namespace twobp::test {

inline std::vector<int64_t> list(const at::Tensor& tensor) {
  const auto* data = tensor.data_ptr<int64_t>();
  return {data, data + tensor.numel()};
}

inline std::vector<int64_t> all_labels(const Dataset& data) {
  std::vector<int64_t> out;
  for (int64_t i = 0; i < data.size(); ++i) out.push_back(list(data.read({i}, kEvaluation).at("labels"))[0]);
  return out;
}

class ImageData : public testing::Test {
 protected:
  ImageData() {
    model_.classes = 3;
    model_.channels = 3;
    data_.held_out = 0;
  }
  DataSplit open() const { return open_images(data_, model_, 1); }
  void refuse(const std::vector<std::string>& parts) const {
    expect_error([&] { open(); }, parts);
  }

  TempFolder folder_;
  DataConfig data_;
  ModelInput model_;
};

}  // namespace twobp::test
