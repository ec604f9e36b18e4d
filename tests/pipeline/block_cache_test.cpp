// Tests reused memory. It returns to the thread that allocated it, wherever the tensor is freed, and the cache keeps no
// more than is useful.
#include "twobp/pipeline/memory/block_cache.h"

#include <cstdlib>
#include <functional>
#include <thread>

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

namespace twobp::TWOBP_FILE {
namespace {

#if !defined(__SANITIZE_ADDRESS__)

constexpr int64_t kMiB = 1 << 20;

at::Tensor bytes(int64_t count) {
  return at::empty({count}, at::TensorOptions().dtype(at::kByte));
}

int64_t allocations_of(const std::function<void()>& body) {
  const int64_t before = BlockCache::allocations();
  body();
  return BlockCache::allocations() - before;
}

void install_between() {
  c10::Allocator* before = c10::GetCPUAllocator();
  at::Tensor older = bytes(1000);
  void* by_address = before->raw_allocate(1000);
  {
    const BlockCache::Use use;
    bytes(1000);
    EXPECT_EQ(BlockCache::allocations(), 0);
    EXPECT_EQ(c10::GetCPUAllocator(), before);
  }
  BlockCache::install();
  c10::Allocator* after = c10::GetCPUAllocator();
  EXPECT_NE(after, before);
  BlockCache::install();
  EXPECT_EQ(c10::GetCPUAllocator(), after);
  older.fill_(1);
  older.reset();
  after->raw_deallocate(by_address);
  after->raw_deallocate(after->raw_allocate(1000));
  after->raw_deallocate(nullptr);
}

// The test runs in a process of its own, in which no other test has called install().
TEST(BlockCache, ChangesNothingBeforeInstall) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        install_between();
        std::exit(HasFailure() ? 1 : 0);
      },
      ::testing::ExitedWithCode(0), "");
}

class BlockCacheTest : public ::testing::Test {
 protected:
  void SetUp() override { BlockCache::install(); }
};

TEST_F(BlockCacheTest, GivesTheSameMemoryAgain) {
  const BlockCache::Use use;
  at::Tensor tensor = bytes(1000);
  const void* first = tensor.const_data_ptr();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first) % 64, 0U);
  tensor.reset();
  EXPECT_EQ(allocations_of([&] { tensor = bytes(1000); }), 0);
  EXPECT_EQ(tensor.const_data_ptr(), first);
  at::Tensor other;
  EXPECT_EQ(allocations_of([&] { other = bytes(1000); }), 1) << "the first is in use";
  other.fill_(1);
  tensor.fill_(2);
  EXPECT_EQ(other.sum().item<int64_t>(), 1000);
  EXPECT_EQ(allocations_of([&] { bytes(0); }), 0);
}

TEST_F(BlockCacheTest, TakesBackMemoryThatAnotherThreadFrees) {
  const BlockCache::Use use;
  at::Tensor tensor = bytes(1000);
  const void* first = tensor.const_data_ptr();
  std::thread([given = std::move(tensor)]() mutable { given.reset(); }).join();
  EXPECT_EQ(allocations_of([&] { tensor = bytes(1000); }), 0);
  EXPECT_EQ(tensor.const_data_ptr(), first);
}

TEST_F(BlockCacheTest, KeepsTwiceTheMemoryOfAStep) {
  const BlockCache::Use use;
  const at::Tensor stays = bytes(100 * kMiB);
  BlockCache::begin_step();
  bytes(2 * kMiB);
  BlockCache::begin_step();
  bytes(3 * kMiB);  // 5 MiB in all; 3 MiB of them were in use
  EXPECT_EQ(allocations_of([] { bytes(2 * kMiB); }), 0);
  BlockCache::begin_step();
  EXPECT_EQ(allocations_of([] { bytes(3 * kMiB); }), 0);
  bytes(kMiB + 3 * kMiB / 4);
  BlockCache::begin_step();
  EXPECT_EQ(allocations_of([] { bytes(2 * kMiB); }), 0) << "6.75 MiB in all";
  BlockCache::begin_step();
  EXPECT_EQ(allocations_of([] { bytes(3 * kMiB); }), 0);
  // 9.25 MiB would exceed 9 MiB, so the block that was unused for longest is freed.
  bytes(2 * kMiB + kMiB / 2);
  EXPECT_EQ(allocations_of([] { bytes(3 * kMiB); }), 0);
  EXPECT_EQ(allocations_of([] { bytes(2 * kMiB); }), 0);
  EXPECT_EQ(allocations_of([] { bytes(kMiB + 3 * kMiB / 4); }), 1);
}

// A sample of another length finds the memory of one before it.
TEST_F(BlockCacheTest, GivesLargeTensorsOfSimilarSizesTheSameMemory) {
  const BlockCache::Use use;
  bytes(5 * kMiB);
  for (int64_t size = 4 * kMiB + 1; size <= 5 * kMiB; size += 100'001)
    EXPECT_EQ(allocations_of([&] { bytes(size).fill_(1); }), 0) << size;
  EXPECT_EQ(allocations_of([] { bytes(5 * kMiB + 1); }), 1);
}

TEST_F(BlockCacheTest, FreesUnusedBlocks) {
  const BlockCache::Use use;
  bytes(kMiB);
  BlockCache::begin_step();
  EXPECT_EQ(allocations_of([] { bytes(kMiB); }), 1) << "what was freed before the first step";
  bytes(2 * kMiB);
  for (int step = 0; step < 20; ++step) {
    BlockCache::begin_step();
    EXPECT_EQ(allocations_of([] { bytes(2 * kMiB); }), 0);
  }
  EXPECT_EQ(allocations_of([] { bytes(kMiB); }), 1);
}

TEST_F(BlockCacheTest, FreesItsBlocksAtTheEnd) {
  at::Tensor tensor;
  std::thread([&] {
    const BlockCache::Use use;
    const BlockCache::Use within;
    tensor = bytes(1000);
  }).join();
  const BlockCache::Use use;
  tensor.reset();
  EXPECT_EQ(allocations_of([] { bytes(1000); }), 1) << "it went back to the system, not to another cache";
}

TEST_F(BlockCacheTest, TensorsOutliveIt) {
  at::Tensor tensor;
  {
    const BlockCache::Use use;
    tensor = bytes(1000).fill_(3);
  }
  EXPECT_EQ(tensor.sum().item<int64_t>(), 3000);
  tensor.reset();
}

TEST_F(BlockCacheTest, OtherThreadsKeepNothing) {
  EXPECT_EQ(allocations_of([] {
              bytes(1000);
              bytes(1000);
            }),
            0);
}

#endif

}  // namespace
}  // namespace twobp::TWOBP_FILE
