// Tests the memory of received tensors. It is reused, never twice at once, and LibTorch's profiling sees it.
#include <map>

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>

#include "twobp/transport/message.h"

namespace twobp::TWOBP_FILE {
namespace {

struct Books : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override { held += bytes; }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t held = 0;
};

at::Tensor allocate(ReceiveMemory& memory, int64_t count) {
  return memory.allocate({count}, {1}, at::kFloat);
}

TEST(ReceiveMemory, GivesOrdinaryTensors) {
  ReceiveMemory memory;
  const at::Tensor tensor = memory.allocate({3, 4}, {1, 3}, at::kHalf);
  EXPECT_EQ(tensor.sizes(), (at::IntArrayRef{3, 4}));
  EXPECT_EQ(tensor.strides(), (at::IntArrayRef{1, 3}));
  EXPECT_EQ(tensor.scalar_type(), at::kHalf);
  EXPECT_EQ(tensor.storage().nbytes(), 24U);
  EXPECT_EQ(tensor.storage().use_count(), 1U) << "a layer may overwrite it";
  EXPECT_EQ(memory.allocate({0, 4}, {4, 1}, at::kFloat).numel(), 0);
}

TEST(ReceiveMemory, IsReusedForTheSameSize) {
  ReceiveMemory memory;
  at::Tensor first = allocate(memory, 1000);
  const void* where = first.const_data_ptr();
  const at::Tensor second = allocate(memory, 1000);
  EXPECT_NE(second.const_data_ptr(), where) << "in use";
  at::Tensor view = first.narrow(0, 10, 10);
  first.reset();
  EXPECT_NE(allocate(memory, 1000).const_data_ptr(), where) << "in use by a view";
  view.reset();
  EXPECT_EQ(memory.allocate({10, 100}, {100, 1}, at::kFloat).const_data_ptr(), where);
  EXPECT_EQ(memory.kept_bytes(), 2 * 4000);
}

TEST(ReceiveMemory, KeepsNoMoreThanItsLimit) {
  ReceiveMemory memory(10000);
  allocate(memory, 5000);
  EXPECT_EQ(memory.kept_bytes(), 0) << "too large";
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 5; ++i) tensors.push_back(allocate(memory, 1000));
  tensors.clear();
  EXPECT_EQ(memory.kept_bytes(), 8000);
}

TEST(ReceiveMemory, TensorsOutliveIt) {
  at::Tensor tensor;
  {
    ReceiveMemory memory;
    tensor = allocate(memory, 1000);
  }
  tensor.fill_(2);
  EXPECT_EQ(tensor.sum().item<double>(), 2000);
}

TEST(ReceiveMemory, IsReportedToTheProfilerWhileInUse) {
  auto books = std::make_shared<Books>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, books);
  ReceiveMemory memory;
  for (int round = 0; round < 3; ++round) {
    at::Tensor tensor = allocate(memory, 1000);
    EXPECT_EQ(books->held, 4000) << round;
    tensor.reset();
    EXPECT_EQ(books->held, 0) << round;
  }
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
