// The input is the header that precedes tensors sent by NCCL. It contains numbers, and it describes as many tensors as
// the first byte says.
#include <cstring>

#include "fuzz/input.h"
#include "twobp/transport/nccl/nccl_link.h"

using namespace twobp;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  Values head = {at::empty({static_cast<int64_t>((size - 1) / sizeof(int64_t))}, at::kLong)};
  if (head[0].numel() > 0) std::memcpy(head[0].mutable_data_ptr(), data + 1, head[0].nbytes());
  for (int i = 0; i < (data[0] & 3); ++i) head.push_back(at::zeros({1}));
  const auto read = fuzz::accepted([&] { return unpack_head(head, 1); });
  if (!read) return 0;
  fuzz::require(read->on_device.size() == read->shapes.size(), "the numbers of tensors and shapes differ");
  for (const int place : read->on_device) {
    fuzz::require(place >= 0 && std::cmp_less(place, read->values.size()), "the place of a tensor is out of range");
  }
  return 0;
}
