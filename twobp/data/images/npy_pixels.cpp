#include <filesystem>
#include <memory>
#include <string>

#include "twobp/core/check.h"
#include "twobp/data/array_dataset.h"
#include "twobp/data/images/pixel_array.h"
#include "twobp/files/npy.h"

namespace twobp {

PixelArray read_pixel_arrays(const std::string& folder) {
  const auto pixels = std::make_shared<const NpyArray>(std::filesystem::path(folder) / "pixel_values.npy");
  const NpyArray labels(std::filesystem::path(folder) / "labels.npy");
  const auto& shape = pixels->shape();
  TWOBP_CHECK(pixels->type() == NpyType::kUInt8 || pixels->type() == NpyType::kFloat32, pixels->path(), ": holds ",
              npy_type_name(pixels->type()), ", but pictures are uint8 (0 to 255) or float32: convert it.");
  TWOBP_CHECK(shape.size() == 4, pixels->path(), ": shape ", shape_text(shape),
              ", but four dimensions are expected: (pictures, channels, height, width).");
  TWOBP_CHECK(pixels->elements() > 0, pixels->path(), ": shape ", shape_text(shape), ": there is no picture in it.");
  TWOBP_CHECK(labels.type() != NpyType::kFloat32, labels.path(),
              ": holds float32, but labels are class numbers: save it as int64.");
  TWOBP_CHECK(labels.shape().size() == 1 && labels.shape()[0] == shape[0], labels.path(), ": shape ",
              shape_text(labels.shape()), ", but pixel_values.npy has ", shape_text(shape),
              ": every picture needs one label, so (", shape[0], ",) is expected.");
  refuse_other_arrays(folder, {"pixel_values", "labels"}, "a model of pictures");
  PixelArray out;
  out.path = pixels->path();
  out.file = pixels;
  out.type = pixels->type() == NpyType::kUInt8 ? at::kByte : at::kFloat;
  out.count = shape[0];
  out.channels = shape[1];
  out.height = shape[2];
  out.width = shape[3];
  labels.visit(0, labels.elements(), [&](const auto* first) { out.labels.assign(first, first + labels.elements()); });
  return out;
}

}  // namespace twobp
