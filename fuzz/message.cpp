// What a rank of another process sends: the head of a message, small tensors included.
#include "twobp/transport/message.h"

#include "fuzz/input.h"

using namespace twobp;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::vector<uint8_t> bytes(data, data + size);  // of just this size: reading beyond is seen
  const auto head = std::as_bytes(std::span(bytes));
  const auto message = fuzz::accepted([&] { return unpack_message(head, 1, /*device_memory=*/false); });
  if (!message || message->is_abort) return 0;
  fuzz::require(message->on_device.size() == message->values.size(), "a value without a place");
  for (const at::Tensor& value : message->values) {
    if (value.defined()) fuzz::require(value.numel() >= 0 && value.is_cpu(), "a value that is nowhere");
  }
  if (!message->apart.empty()) return 0;  // their memory comes later
  const OutgoingMessage again = pack_message(message->tag, message->number, message->values, false);
  const auto read = unpack_message(again.head, 1, false);
  fuzz::require(read.tag == message->tag && read.values.size() == message->values.size(),
                "a message that was read is another one when it is sent on");
  return 0;
}
