// The input is a NumPy .npy file. Every element of an accepted array is read.
#include "twobp/files/npy.h"

#include "fuzz/input.h"

using namespace twobp;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static fuzz::File file;
  const auto array = fuzz::accepted([&] { return NpyArray(file.holding(data, size)); });
  if (!array) return 0;
  double sum = 0;
  array->visit(0, array->elements(), [&](const auto* values) {
    for (int64_t i = 0; i < array->elements(); ++i) sum += static_cast<double>(values[i]);
  });
  fuzz::require(!shape_text(array->shape()).empty() || sum > 0, "a shape has no text");
  return 0;
}
