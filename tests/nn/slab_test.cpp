// Slab: slots in a ring, what counts as a copy; concatenate_rows: one view of neighbours, never a view across
// memories.
#include "twobp/nn/slab.h"

#include "tests/nn/layer_test_util.h"

namespace twobp {
namespace {

using namespace test;

const at::TensorOptions kOptions = at::TensorOptions().dtype(at::kFloat);

TEST(Slab, SlotsFollowEachOtherAndWrapAround) {
  Slab slab(3);
  std::vector<at::Tensor> slots;
  for (int64_t m = 0; m < 6; ++m) slots.push_back(slab.slot(m, 4, 5, kOptions));
  for (int64_t m = 0; m < 6; ++m) {
    EXPECT_EQ(slots[m].sizes(), (std::vector<int64_t>{4, 5}));
    EXPECT_TRUE(slots[m].is_contiguous());
    EXPECT_EQ(slots[m].const_data_ptr<float>(), slots[0].const_data_ptr<float>() + (m % 3) * 4 * 5);
  }
}

TEST(Slab, ShorterMicroBatchTakesTheStartOfItsSlot) {
  Slab slab(2);
  const at::Tensor first = slab.slot(0, 4, 5, kOptions);
  const at::Tensor last = slab.slot(1, 3, 5, kOptions);
  EXPECT_EQ(last.sizes(), (std::vector<int64_t>{3, 5}));
  EXPECT_EQ(last.const_data_ptr<float>(), first.const_data_ptr<float>() + 4 * 5);
}

TEST(Slab, WhatDoesNotFitGetsNoSlot) {
  Slab slab(2);
  EXPECT_TRUE(slab.slot(0, 4, 5, kOptions).defined());
  EXPECT_FALSE(slab.slot(1, 5, 5, kOptions).defined());
  EXPECT_FALSE(slab.slot(1, 4, 6, kOptions).defined());
  const at::Tensor large = random({5, 5}, 1, at::kFloat);
  EXPECT_EQ(slab.place(large, 1).const_data_ptr(), large.const_data_ptr());
  EXPECT_EQ(slab.copies(), 0);
}

TEST(Slab, PlaceCountsCopies) {
  Slab slab(2);
  const at::Tensor elsewhere = random({4, 5}, 1, at::kFloat);
  const at::Tensor placed = slab.place(elsewhere, 1);
  EXPECT_EQ(slab.copies(), 1);
  EXPECT_TRUE(same_bits(placed, elsewhere));
  const at::Tensor slot = slab.slot(1, 4, 5, kOptions);
  EXPECT_EQ(placed.const_data_ptr(), slot.const_data_ptr());
  EXPECT_EQ(slab.place(slot, 1).const_data_ptr(), slot.const_data_ptr());
  EXPECT_EQ(slab.copies(), 1) << "it was written there";
  slab.place(slot, 0);  // another micro-batch's slot
  EXPECT_EQ(slab.copies(), 2);
  slab.place(elsewhere.t().contiguous().t(), 0);
  EXPECT_TRUE(same_bits(slab.slot(0, 4, 5, kOptions), elsewhere)) << "strides do not matter";
}

// Context::output: in the slot if there is one that fits, else fresh; a destination is for one result alone.
TEST(Slab, ContextHandsOutTheSlotOnce) {
  Slab slab(2);
  Context context;
  context.micro_batch = 1;
  context.destination = &slab;
  const at::Tensor result = context.output({2, 3, 5}, kOptions);
  EXPECT_EQ(result.sizes(), (std::vector<int64_t>{2, 3, 5}));
  EXPECT_EQ(result.const_data_ptr(), slab.slot(1, 6, 5, kOptions).const_data_ptr());
  EXPECT_EQ(context.destination, nullptr);
  EXPECT_FALSE(context.output({2, 3, 5}, kOptions).is_alias_of(result));
  context.destination = &slab;
  EXPECT_FALSE(context.output({2, 4, 5}, kOptions).is_alias_of(result)) << "larger than a slot";
  context.destination = &slab;
  EXPECT_FALSE(context.output({2, 3, 5}, kOptions.dtype(at::kDouble)).is_alias_of(result)) << "another dtype";
  EXPECT_EQ(context.destination, nullptr);
}

// Evaluation saves nothing, so its results have no business in a slot whose tensor a W may still read; nor
// does its micro-batch size say how large a slot must be.
TEST(Slab, EvaluationGetsNoSlot) {
  Slab slab(2);
  Context context;
  context.training = false;
  context.destination = &slab;
  const at::Tensor evaluated = context.output({2, 5}, kOptions);
  EXPECT_EQ(context.destination, nullptr);
  const at::Tensor slot = slab.slot(0, 4, 5, kOptions);
  ASSERT_TRUE(slot.defined()) << "the evaluation decided the size of a slot";
  EXPECT_FALSE(evaluated.is_alias_of(slot));
}

std::vector<at::Tensor> filled_slots(Slab& slab, const std::vector<int64_t>& micro_batches,
                                     int64_t rows = 4) {
  std::vector<at::Tensor> slots;
  for (const int64_t m : micro_batches) {
    slots.push_back(slab.slot(m, rows, 5, kOptions));
    slots.back().copy_(random({rows, 5}, 100 + m, at::kFloat));
  }
  return slots;
}

TEST(Slab, NeighboursAreOneView) {
  Slab slab(4);
  const auto slots = filled_slots(slab, {0, 1, 2});
  const auto runs = concatenate_rows(slots, false);
  ASSERT_EQ(runs.size(), 1u);
  EXPECT_EQ(runs[0].const_data_ptr(), slots[0].const_data_ptr());
  EXPECT_TRUE(same_bits(runs[0], at::cat(slots, 0)));
}

TEST(Slab, RunsBreakAtTheEndOfTheRing) {
  Slab slab(4);
  const auto slots = filled_slots(slab, {2, 3, 4, 5});
  const auto runs = concatenate_rows(slots, false);
  ASSERT_EQ(runs.size(), 2u);
  EXPECT_TRUE(same_bits(runs[0], at::cat({slots[0], slots[1]}, 0)));
  EXPECT_TRUE(same_bits(runs[1], at::cat({slots[2], slots[3]}, 0)));
}

TEST(Slab, RunsBreakAtGapsAndAtShortMicroBatches) {
  Slab slab(4);
  auto slots = filled_slots(slab, {0, 2});
  EXPECT_EQ(concatenate_rows(slots, false).size(), 2u) << "1 is missing";
  slots = filled_slots(slab, {0, 1});
  slots.push_back(slab.slot(2, 3, 5, kOptions));  // shorter: still the next rows
  auto runs = concatenate_rows(slots, false);
  ASSERT_EQ(runs.size(), 1u);
  EXPECT_EQ(runs[0].size(0), 4 + 4 + 3);
  slots.push_back(slab.slot(3, 4, 5, kOptions));  // but behind it is a gap
  runs = concatenate_rows(slots, false);
  ASSERT_EQ(runs.size(), 2u);
  EXPECT_EQ(runs[1].const_data_ptr(), slots[3].const_data_ptr());
}

// Two memories, the second exactly where the first one's offset would go on.
TEST(Slab, NeverOneViewAcrossMemories) {
  const at::Tensor a = random({8, 5}, 1, at::kFloat);
  const at::Tensor b = random({8, 5}, 2, at::kFloat);
  const std::vector<at::Tensor> parts = {a.narrow(0, 0, 4), b.narrow(0, 4, 4)};
  const auto runs = concatenate_rows(parts, false);
  ASSERT_EQ(runs.size(), 2u);
  EXPECT_TRUE(same_bits(runs[0], parts[0]));
  EXPECT_TRUE(same_bits(runs[1], parts[1]));
}

// Neighbours by their offset, but laid out otherwise.
TEST(Slab, NeverOneViewAcrossLayouts) {
  const at::Tensor memory = random({50}, 1, at::kFloat);
  const at::Tensor first = memory.narrow(0, 0, 25).view({5, 5});
  const at::Tensor swapped = memory.narrow(0, 25, 25).view({5, 5}).t();
  const at::Tensor narrow = memory.narrow(0, 25, 20).view({5, 4});
  EXPECT_EQ(concatenate_rows(std::vector<at::Tensor>{first, swapped}, false).size(), 2u);
  EXPECT_EQ(concatenate_rows(std::vector<at::Tensor>{swapped, first}, false).size(), 2u);
  EXPECT_EQ(concatenate_rows(std::vector<at::Tensor>{first, narrow}, false).size(), 2u);
}

TEST(Slab, CopyingMakesOneMatrixOfAnything) {
  Slab slab(4);
  auto slots = filled_slots(slab, {3, 0, 2});
  slots.push_back(random({2, 5}, 7, at::kFloat));
  const auto runs = concatenate_rows(slots, true);
  ASSERT_EQ(runs.size(), 1u);
  EXPECT_TRUE(same_bits(runs[0], at::cat(slots, 0)));
  for (const auto& slot : slots) EXPECT_FALSE(runs[0].is_alias_of(slot));
}

}  // namespace
}  // namespace twobp
