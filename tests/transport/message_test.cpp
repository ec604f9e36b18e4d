// Tests messages as bytes. They come out as they went in, and a wrong message from a peer is refused with an error.
#include "twobp/transport/message.h"

#include <cstring>
#include <random>

#include <gtest/gtest.h>

#include "tests/expect_error.h"

namespace twobp::TWOBP_FILE {
namespace {

const Tag kTag = {1234567890123, -1, 7, MessageKind::kBackward, 3};

// Sends a message as over a wire. The parts that travel apart are copied into the memory that was made for them.
IncomingMessage there(const OutgoingMessage& message) {
  IncomingMessage in = unpack_message(message.head, 4);
  EXPECT_EQ(in.apart.size(), message.apart.size());
  for (size_t i = 0; i < in.apart.size(); ++i) {
    EXPECT_EQ(in.apart[i].nbytes(), message.apart[i].nbytes());
    std::memcpy(in.apart[i].mutable_data_ptr(), message.apart[i].const_data_ptr(), in.apart[i].nbytes());
  }
  return in;
}

TEST(Message, CarriesTagTypesAndShapes) {
  const Values values = {at::arange(12, at::kFloat).view({3, 4}),
                         at::arange(6, at::kLong).view({2, 3}).t(),
                         at::empty({0, 5}, at::kDouble),
                         at::rand({40, 50}, at::kFloat),
                         at::full({}, 2.5, at::kBFloat16),
                         at::ones({3}, at::kBool),
                         at::rand({64, 32, 3}, at::kFloat).permute({2, 0, 1}),
                         {}};
  const OutgoingMessage out = pack_message(kTag, 42, values);
  EXPECT_EQ(out.apart.size(), 2U) << "the large ones";
  const IncomingMessage in = there(out);
  EXPECT_FALSE(in.is_abort);
  EXPECT_EQ(in.tag, kTag);
  EXPECT_EQ(in.number, 42);
  ASSERT_EQ(in.values.size(), values.size());
  EXPECT_FALSE(in.values.back().defined());
  for (size_t i = 0; i + 1 < values.size(); ++i) {
    EXPECT_EQ(in.values[i].scalar_type(), values[i].scalar_type());
    EXPECT_EQ(in.values[i].sizes(), values[i].sizes());
    EXPECT_EQ(in.values[i].strides(), values[i].strides());
    EXPECT_TRUE(at::equal(in.values[i], values[i]));
  }
}

TEST(Message, ClosesGapsAndKeepsTheOrderOfDimensions) {
  const at::Tensor big = at::rand({50, 60});
  const Values values = {big.narrow(1, 3, 40), big.t().narrow(0, 3, 40), big[0].expand({30, 60})};
  const IncomingMessage in = there(pack_message(kTag, 0, values));
  for (size_t i = 0; i < values.size(); ++i) EXPECT_TRUE(at::equal(in.values[i], values[i])) << i;
  EXPECT_EQ(in.values[0].strides(), (at::IntArrayRef{40, 1}));
  EXPECT_EQ(in.values[1].strides(), (at::IntArrayRef{1, 40}));
}

TEST(Message, LargeTensorsAreNotCopied) {
  const at::Tensor large = at::rand({1000});
  const OutgoingMessage out = pack_message(kTag, 0, {large});
  ASSERT_EQ(out.apart.size(), 1U);
  EXPECT_EQ(out.apart[0].const_data_ptr(), large.const_data_ptr());
  const at::Tensor transposed = at::rand({100, 20}).t();
  EXPECT_EQ(pack_message(kTag, 0, {transposed}).apart.at(0).const_data_ptr(), transposed.const_data_ptr());
}

TEST(Message, AbortCarriesItsReason) {
  const IncomingMessage in = unpack_message(pack_abort("rank 2, step 7: out of luck"), 2);
  EXPECT_TRUE(in.is_abort);
  EXPECT_EQ(in.reason, "rank 2, step 7: out of luck");
  const std::string endless(kMostHeadBytes + 5, 'x');
  EXPECT_LE(static_cast<int64_t>(pack_abort(endless).size()), kMostHeadBytes);
}

TEST(Message, RejectsTensorsThatItCannotCarry) {
  test::expect_error([] { pack_message(kTag, 0, {at::eye(3).to_sparse()}); }, {"plain tensors"});
  test::expect_error([] { pack_message(kTag, 0, {at::empty({3}, at::kMeta)}); }, {"of a CPU's memory"});
  Values many;
  for (int i = 0; i < 100000; ++i) many.push_back(at::empty({0}));
  test::expect_error([&] { pack_message(kTag, 0, many); }, {"100000 tensors"});
}

std::vector<std::byte> sample() {
  return pack_message(kTag, 1, {at::rand({2, 3}), at::rand({30, 40}), at::arange(4)}).head;
}

// A number is at this position in a head: after the first 40 bytes come 8 bytes of the first tensor, its sizes and its
// strides.
void set_number(std::vector<std::byte>& head, size_t offset, int64_t value) {
  std::memcpy(head.data() + offset, &value, sizeof(value));
}

TEST(Message, NamesTheSenderOfAnInvalidMessage) {
  const auto expect = [](size_t offset, int64_t value, const std::string& part) {
    std::vector<std::byte> head = sample();
    set_number(head, offset, value);
    test::expect_error([&] { unpack_message(head, 4); },
                       {"a message from rank 4 makes no sense", part, "same version"});
  };
  expect(0, 12345, "unknown bytes");
  expect(48, -2, "size -2");
  expect(48 + 16, 5, "gaps or overlaps");
  expect(48 + 16, -3, "stride -3");
  std::vector<std::byte> longer = sample();
  longer.push_back(std::byte{0});
  test::expect_error([&] { unpack_message(longer, 4); }, {"longer than it says"});
  std::vector<std::byte> type = sample();
  type[40] = std::byte{255};
  test::expect_error([&] { unpack_message(type, 4); }, {"unknown type"});
}

TEST(Message, TooManyBytesDoNotOverflow) {
  std::vector<std::byte> head = pack_message(kTag, 1, {at::rand({30, 40})}).head;
  set_number(head, 48, int64_t{1} << 62);
  set_number(head, 56, int64_t{1} << 62);
  test::expect_error([&] { unpack_message(head, 4); }, {"too large"});
  // A tensor without elements does not overflow either. Its other sizes determine its strides.
  head = pack_message(kTag, 1, {at::empty({0, 3, 3})}).head;
  set_number(head, 56, int64_t{1} << 62);
  set_number(head, 64, int64_t{1} << 62);
  test::expect_error([&] { unpack_message(head, 4); }, {"too large"});
}

// The receiver allocates no memory for data that does not exist.
TEST(Message, AHeadCannotRequestMemory) {
  std::vector<std::byte> head = pack_message(kTag, 1, {at::rand({3000})}).head;
  set_number(head, 48, int64_t{1} << 58);
  test::expect_error([&] { unpack_message(head, 4); }, {"too large", "from rank 4"});
  head = pack_message(kTag, 1, {at::rand({3})}).head;
  set_number(head, 48, int64_t{1} << 36);
  test::expect_error([&] { unpack_message(head, 4); }, {"ends too early"});
}

TEST(Message, EveryShorterHeadIsRefused) {
  const std::vector<std::byte> head = sample();
  for (size_t length = 0; length < head.size(); ++length) {
    EXPECT_THROW(unpack_message({head.data(), length}, 4), Error) << length;
  }
}

// Changed bytes give an error, or a message whose tensors fit into their memory.
TEST(Message, ChangedBytesDoNoHarm) {
  std::mt19937 random(7);
  const std::vector<std::byte> head = sample();
  int refused = 0;
  for (int round = 0; round < 20000; ++round) {
    std::vector<std::byte> changed = head;
    const int changes = 1 + static_cast<int>(random() % 3);
    for (int i = 0; i < changes; ++i) changed[random() % changed.size()] = static_cast<std::byte>(random() % 4);
    try {
      const IncomingMessage in = unpack_message(changed, 4);
      for (const at::Tensor& value : in.values) {
        if (!value.defined()) continue;
        EXPECT_LE(value.nbytes(), value.storage().nbytes());
      }
    } catch (const std::exception&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
