// Tests the contents of messages on every transport: large ones in both directions at once, tensors of every layout and
// type, and messages that arrive while both ends compute.
#include <chrono>
#include <thread>

#include <gtest/gtest.h>

#include "tests/transport/transports.h"
#include "twobp/core/measure.h"
#include "twobp/transport/collectives.h"

namespace twobp::TWOBP_FILE {
namespace {

constexpr double kLong = 120;  // seconds
constexpr int64_t kMiB = 1 << 20;

class LargeMessages : public test::OnEveryTransport {};

// Makes floats whose values tell their positions, up to 2^24.
at::Tensor numbered(int64_t count, int64_t from = 0) {
  return at::remainder(at::arange(from, from + count, at::kLong), 1 << 24).to(at::kFloat);
}

TEST_P(LargeMessages, GoInBothDirectionsAtOnce) {
  run(2, [](Transport& transport) {
    const int other = 1 - transport.rank();
    constexpr int64_t kCount = 64 * kMiB / 4;
    for (int i = 0; i < 2; ++i) {
      transport.isend(other, {.micro_batch = i}, {numbered(kCount, i + 100 * transport.rank())});
    }
    for (int i = 1; i >= 0; --i) {
      const Values values = transport.receive(other, {.micro_batch = i}, kLong);
      EXPECT_TRUE(at::equal(values.at(0), numbered(kCount, i + 100 * other)));
    }
    transport.flush(kLong);
  });
}

// The message needs more than one MPI message, and not a whole number of them.
TEST_P(LargeMessages, MayBeLargerThanAChunk) {
  run(2, [](Transport& transport) {
    const at::Tensor large = numbered((70 * kMiB + 12) / 4);
    if (transport.rank() == 0) {
      transport.isend(1, {}, {large, at::ones({3}), large.narrow(0, 5, kMiB)});
      transport.flush(kLong);
    } else {
      const Values values = transport.receive(0, {}, kLong);
      ASSERT_EQ(values.size(), 3U);
      EXPECT_TRUE(at::equal(values[0], large));
      EXPECT_TRUE(at::equal(values[1], at::ones({3})));
      EXPECT_TRUE(at::equal(values[2], large.narrow(0, 5, kMiB)));
    }
  });
}

// Neither end waits. progress() between layers moves the messages.
TEST_P(LargeMessages, ArriveBetweenLayers) {
  run(2, [](Transport& transport) {
    const int other = 1 - transport.rank();
    constexpr int64_t kCount = 8 * kMiB / 4;
    for (int i = 0; i < 4; ++i) {
      transport.isend(other, {.micro_batch = i}, {numbered(kCount, i)});
    }
    barrier(transport, kLong);
    int layers = 0;
    Values values;
    for (int i = 0; i < 4; ++i) {
      while (!transport.try_receive(other, {.micro_batch = i}, values)) {
        ASSERT_LT(++layers, 20000) << "message " << i;
        for (int layer = 0; layer < 5; ++layer) {
          std::this_thread::sleep_for(std::chrono::microseconds(200));
          transport.progress();
        }
      }
      EXPECT_TRUE(at::equal(values.at(0), numbered(kCount, i)));
    }
    EXPECT_LT(layers, 2000);
    barrier(transport, kLong);
  });
}

TEST_P(LargeMessages, KeepTheirLayouts) {
  run(2, [](Transport& transport) {
    for (const int64_t size : {int64_t{3}, int64_t{70}}) {  // in the head of a message, and apart
      const at::Tensor cube = numbered(size * size * size).view({size, size, size});
      // Tensors without gaps keep their strides, since other strides may lead to other kernels and other bits.
      const Values dense = {cube, cube.permute({2, 0, 1}), cube.transpose(0, 1),
                            cube.view({1, size, size, size}).contiguous(at::MemoryFormat::ChannelsLast)};
      const Values gaps = {cube.narrow(1, 1, 2), cube.select(2, 1), cube.select(0, 0).expand({4, size, size})};
      if (transport.rank() == 0) {
        transport.isend(1, {.micro_batch = 0}, dense);
        transport.isend(1, {.micro_batch = 1}, gaps);
        continue;
      }
      const Values dense_here = transport.receive(0, {.micro_batch = 0}, kLong);
      for (size_t i = 0; i < dense.size(); ++i) {
        EXPECT_TRUE(at::equal(dense_here.at(i), dense[i])) << i;
        EXPECT_EQ(dense_here[i].strides(), dense[i].strides()) << i;
      }
      const Values gaps_here = transport.receive(0, {.micro_batch = 1}, kLong);
      for (size_t i = 0; i < gaps.size(); ++i) EXPECT_TRUE(at::equal(gaps_here.at(i), gaps[i])) << i;
    }
  });
}

TEST_P(LargeMessages, CarryEveryTypeOfNumber) {
  run(2, [](Transport& transport) {
    const std::vector<at::ScalarType> types = {at::kFloat, at::kDouble, at::kHalf,        at::kBFloat16,
                                               at::kByte,  at::kChar,   at::kShort,       at::kInt,
                                               at::kLong,  at::kBool,   at::kComplexFloat};
    for (const int64_t count : {int64_t{0}, int64_t{7}, int64_t{9001}}) {
      Values values;
      for (const auto type : types) values.push_back(at::remainder(at::arange(count), 2).to(type));
      values.push_back(at::full({}, 3.0));
      values.emplace_back();  // an undefined tensor
      if (transport.rank() == 0) {
        transport.isend(1, {.step = count}, values);
        continue;
      }
      const Values here = transport.receive(0, {.step = count}, kLong);
      ASSERT_EQ(here.size(), values.size());
      for (size_t i = 0; i <= types.size(); ++i) {
        EXPECT_EQ(here[i].scalar_type(), values[i].scalar_type());
        EXPECT_EQ(here[i].sizes(), values[i].sizes());
        EXPECT_TRUE(at::equal(here[i], values[i])) << here[i].toString();
      }
      EXPECT_FALSE(here.back().defined());
    }
  });
}

// A small message may overtake a large one, but not one with the same tag.
TEST_P(LargeMessages, SmallOnesKeepTheOrderOfTheirTag) {
  run(2, [](Transport& transport) {
    for (int round = 0; round < 10; ++round) {
      if (transport.rank() == 0) {
        for (const int64_t count : {kMiB, int64_t{1}, kMiB / 2, int64_t{2}}) {
          transport.isend(1, {}, {at::ones({count})});
        }
      } else {
        for (const int64_t count : {kMiB, int64_t{1}, kMiB / 2, int64_t{2}}) {
          EXPECT_EQ(transport.receive(0, {}, kLong).at(0).numel(), count);
        }
      }
    }
  });
}

// The sender's memory may be reused only after the message has left.
TEST_P(LargeMessages, SendsKeepTheirTensors) {
  run(2, [](Transport& transport) {
    constexpr int64_t kCount = kMiB / 4;
    constexpr int kMessages = 20;
    if (transport.rank() == 0) {
      for (int i = 0; i < kMessages; ++i) {
        transport.isend(1, {.micro_batch = i}, {numbered(kCount, i)});
        // This tensor has the same size, so it would get the memory of the sent tensor if that were free.
        const at::Tensor other_use = at::full({kCount}, -1.0F);
      }
      transport.flush(kLong);
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      for (int i = kMessages - 1; i >= 0; --i) {
        EXPECT_TRUE(at::equal(transport.receive(0, {.micro_batch = i}, kLong).at(0), numbered(kCount, i))) << i;
      }
    }
  });
}

// A received tensor belongs to its rank. Writing to it changes neither later messages nor the tensors of others.
TEST_P(LargeMessages, ReceivedTensorsDoNotChange) {
  run(2, [](Transport& transport) {
    constexpr int64_t kCount = 100000;
    std::vector<at::Tensor> kept;
    for (int i = 0; i < 30; ++i) {
      if (transport.rank() == 0) {
        transport.isend(1, {.micro_batch = i}, {at::full({kCount}, static_cast<float>(i))});
        continue;
      }
      at::Tensor tensor = transport.receive(0, {.micro_batch = i}, kLong).at(0);
      if (i % 3 == 0) kept.push_back(tensor);
    }
    for (size_t i = 0; i < kept.size(); ++i) {
      EXPECT_TRUE(at::equal(kept[i], at::full({kCount}, 3.0F * static_cast<float>(i)))) << i;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Transports, LargeMessages, ::testing::ValuesIn(test::worlds()), test::name_of_world);

}  // namespace
}  // namespace twobp::TWOBP_FILE
