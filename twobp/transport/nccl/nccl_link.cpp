#include "twobp/transport/nccl/nccl_link.h"

#include <algorithm>
#include <limits>
#include <span>

#include "twobp/core/check.h"
#include "twobp/core/measure.h"
#include "twobp/transport/message.h"

namespace twobp {

// Rank 0 of the two sends.
NcclLink::NcclLink(const NcclApi& api, const DeviceStream& stream, const NcclUniqueId& id, bool sender,
                   const std::string& name)
    : NcclCommunicator(api, stream, id, {2, sender ? 0 : 1, kNcclLinkCtas}, concat("NCCL from ", name)),
      sender_(sender) {}

void NcclLink::first_calls(at::Device memory, double deadline) {
  const auto place = at::TensorOptions(at::kByte).device(memory);
  const at::Tensor byte = sender_ ? at::zeros({1}, place) : at::empty({1}, place);
  put(byte, deadline);
  launched({byte}, awake_seconds(), {});
}

void NcclLink::put(const at::Tensor& tensor, double deadline) {
  check_usable();
  const size_t bytes = tensor.nbytes();
  if (bytes == 0) return;
  void* stream = this->stream().native();
  const int result = sender_ ? api().send(tensor.const_data_ptr(), bytes, NcclApi::kByte, 1, comm(), stream)
                             : api().receive(tensor.mutable_data_ptr(), bytes, NcclApi::kByte, 0, comm(), stream);
  check(result, sender_ ? "ncclSend" : "ncclRecv", deadline);
}

void NcclLink::send(Values values, const Tag& tag) {
  const OnStream here(stream());
  const double begin = awake_seconds();
  for (const at::Tensor& value : values) put(value, begin + kCallSeconds);
  launched(std::move(values), begin, tag);
}

DeviceEvent NcclLink::receive(const Values& values, const Tag& tag) {
  const OnStream here(stream());
  const double begin = awake_seconds();
  for (const at::Tensor& value : values) put(value, begin + kCallSeconds);
  // The memory belongs to this stream, so that it is reused in the stream's order. It need not be kept.
  return launched({}, begin, tag);
}

namespace {

constexpr int64_t kHeadFormat = 1;
constexpr int64_t kMostHeadDimensions = 64;
constexpr int64_t kWithHead = -1;   // in place of a type: the tensor is in the head
constexpr int64_t kUndefined = -2;  // an undefined tensor
constexpr int64_t kByHost = -3;     // the tensor is in the head, and belongs on the device

// Reads the numbers of a head in order.
class Numbers {
 public:
  Numbers(const at::Tensor& tensor, int from) : from_(from) {
    require(tensor.defined() && tensor.is_cpu() && tensor.scalar_type() == at::kLong && tensor.dim() == 1 &&
            tensor.is_contiguous());
    rest_ = {tensor.const_data_ptr<int64_t>(), static_cast<size_t>(tensor.numel())};
  }
  int64_t next(int64_t least, int64_t most) {
    require(!rest_.empty() && rest_[0] >= least && rest_[0] <= most);
    const int64_t number = rest_[0];
    rest_ = rest_.subspan(1);
    return number;
  }
  bool at_end() const { return rest_.empty(); }
  void require(bool holds) const {
    TWOBP_CHECK(holds, "a message's head from rank ", from_,
                " makes no sense: do all ranks run the same version of the program?");
  }

 private:
  int from_;
  std::span<const int64_t> rest_;
};

}  // namespace

PackedHead pack_head(const Tag& tag, Values values, at::DeviceType by_nccl, bool linked) {
  PackedHead packed;
  std::vector<int64_t> numbers = {kHeadFormat,
                                  tag.step,
                                  tag.stage,
                                  tag.micro_batch,
                                  static_cast<int64_t>(tag.kind),
                                  tag.group,
                                  static_cast<int64_t>(values.size())};
  packed.head.emplace_back();
  for (at::Tensor& value : values) {
    if (!value.defined()) {
      numbers.push_back(kUndefined);
    } else if (value.device().type() != by_nccl || !linked) {
      numbers.push_back(value.device().type() == by_nccl ? kByHost : kWithHead);
      packed.head.push_back(value.cpu());
    } else {
      at::Tensor whole = dense(Values{value})[0];
      numbers.push_back(static_cast<int64_t>(whole.scalar_type()));
      numbers.push_back(whole.dim());
      numbers.insert(numbers.end(), whole.sizes().begin(), whole.sizes().end());
      numbers.insert(numbers.end(), whole.strides().begin(), whole.strides().end());
      packed.on_device.push_back(std::move(whole));
    }
  }
  packed.head[0] = at::tensor(numbers, at::kLong);
  return packed;
}

ReceivedHead unpack_head(const Values& head, int from) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  TWOBP_CHECK(!head.empty(), "a message's head from rank ", from, " is empty");
  Numbers numbers(head[0], from);
  ReceivedHead message;
  numbers.next(kHeadFormat, kHeadFormat);
  message.tag.step = numbers.next(std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max());
  message.tag.stage = static_cast<int>(numbers.next(-kMost, kMost));
  message.tag.micro_batch = static_cast<int>(numbers.next(-kMost, kMost));
  message.tag.kind = static_cast<MessageKind>(numbers.next(0, static_cast<int64_t>(MessageKind::kNone)));
  message.tag.group = static_cast<uint8_t>(numbers.next(0, 255));
  const int64_t count = numbers.next(0, kMost);
  size_t in_head = 1;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t type = numbers.next(kByHost, static_cast<int64_t>(at::ScalarType::NumOptions) - 1);
    message.values.emplace_back();
    if (type == kUndefined) continue;
    if (type == kByHost) message.by_host.push_back(static_cast<int>(i));
    if (type == kWithHead || type == kByHost) {
      numbers.require(in_head < head.size());
      message.values.back() = head[in_head++];
      continue;
    }
    ReceivedHead::Shape shape;
    shape.type = static_cast<at::ScalarType>(type);
    const int64_t dimensions = numbers.next(0, kMostHeadDimensions);
    numbers.require(at::isIntegralType(shape.type, true) || at::isFloatingType(shape.type) ||
                    at::isComplexType(shape.type));
    const auto element = static_cast<int64_t>(c10::elementSize(shape.type));
    int64_t bytes = element;  // counts a size of 0 as 1
    bool empty = false;
    for (int64_t d = 0; d < dimensions; ++d) {
      shape.sizes.push_back(numbers.next(0, std::numeric_limits<int64_t>::max() / bytes));
      bytes *= std::max<int64_t>(shape.sizes.back(), 1);
      empty |= shape.sizes.back() == 0;
    }
    int64_t reach = 1;
    for (int64_t d = 0; d < dimensions; ++d) {
      shape.strides.push_back(numbers.next(0, std::numeric_limits<int64_t>::max() / bytes));
      if (!empty) reach += (shape.sizes[d] - 1) * shape.strides[d];
    }
    // The tensor must be dense, so that a receive fills exactly its memory.
    numbers.require(empty || reach * element == bytes);
    message.on_device.push_back(static_cast<int>(i));
    message.shapes.push_back(std::move(shape));
  }
  numbers.require(numbers.at_end() && in_head == head.size());
  return message;
}

Values ReceivedHead::allocate(at::Device device, at::DeviceType by_nccl) {
  const at::Device place = device.type() == by_nccl ? device : at::Device(by_nccl);
  Values tensors;
  for (size_t i = 0; i < on_device.size(); ++i) {
    const Shape& shape = shapes[i];
    values[on_device[i]] = at::empty_strided(shape.sizes, shape.strides, at::TensorOptions(shape.type).device(place));
    tensors.push_back(values[on_device[i]]);
  }
  return tensors;
}

}  // namespace twobp
