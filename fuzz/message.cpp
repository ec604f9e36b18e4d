// The input is the header of a message from a rank in another process, including small tensors.
#include "twobp/transport/message.h"

#include "fuzz/input.h"

using namespace twobp;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::vector<uint8_t> bytes(data, data + size);  // this exact size reveals reads past the end
  const auto head = std::as_bytes(std::span(bytes));
  const auto message = fuzz::accepted([&] { return unpack_message(head, 1); });
  if (!message || message->is_abort) return 0;
  for (const at::Tensor& value : message->values) {
    if (value.defined()) fuzz::require(value.numel() >= 0 && value.is_cpu(), "a value has no CPU memory");
  }
  if (!message->apart.empty()) return 0;  // their memory arrives later
  const OutgoingMessage again = pack_message(message->tag, message->number, message->values);
  const auto read = unpack_message(again.head, 1);
  fuzz::require(read.tag == message->tag && read.values.size() == message->values.size(),
                "a message changes when it is packed and unpacked again");
  return 0;
}
