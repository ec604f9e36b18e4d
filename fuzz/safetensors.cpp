// The input is a safetensors file. Every byte of every accepted tensor is read.
#include "twobp/files/safetensors.h"

#include "fuzz/input.h"

using namespace twobp;

namespace {

uint64_t sum_of(const at::Tensor& tensor) {
  uint64_t sum = 0;
  const auto* bytes = static_cast<const uint8_t*>(tensor.const_data_ptr());
  for (size_t i = 0; i < tensor.nbytes(); ++i) sum += bytes[i];
  return sum;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static fuzz::File storage;
  const auto file = fuzz::accepted([&] { return SafetensorsFile(storage.holding(data, size)); });
  if (!file) return 0;
  uint64_t bytes = 0;
  for (const std::string& name : file->names()) {
    const auto tensor = fuzz::accepted([&] { return file->tensor(name); });
    if (!tensor) continue;  // its type is not supported
    fuzz::require(tensor->sizes() == at::IntArrayRef(file->shape(name)),
                  "the shape of a tensor differs from the header");
    bytes += tensor->nbytes();
    fuzz::require(sum_of(*tensor) <= 255 * tensor->nbytes(), "unreachable");
  }
  fuzz::require(bytes <= size, "the tensors have more bytes than the file");
  return 0;
}
