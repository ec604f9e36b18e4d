// Tests the simulation's model of a stage with numbers by hand, where simulate_property_test does not compare it with a
// second implementation: seconds by weight, no backward pass, streamed gradients, slices.
#include "twobp/schedule/simulate/stage_model.h"

#include <gtest/gtest.h>

#include "tests/schedule/support.h"

namespace twobp::TWOBP_FILE {
namespace {

void expect_growth(const Growth& growth, double seconds, double peak, double held) {
  EXPECT_DOUBLE_EQ(growth.seconds, seconds);
  EXPECT_DOUBLE_EQ(growth.peak, peak);
  EXPECT_DOUBLE_EQ(growth.held, held);
}

void expect_piece(const P2Piece& piece, double begin, double freed, double peak) {
  EXPECT_DOUBLE_EQ(piece.begin, begin);
  EXPECT_DOUBLE_EQ(piece.freed, freed);
  EXPECT_DOUBLE_EQ(piece.peak, peak);
}

// Three stages with messages. Into the middle one come an input of 3 and a gradient of 7.
std::vector<StageCost> three_stages() {
  std::vector<StageCost> costs(3);
  costs[0].output_bytes = 3;
  costs[0].input_gradient_bytes = 100;  // nobody takes it
  StageCost& middle = costs[1];
  middle.forward = 8;
  middle.backward_p1 = 4;
  middle.backward_p2 = 12;
  middle.p2_units = 2;
  middle.activation_bytes = 20;
  middle.stash_bytes = 6;
  middle.output_bytes = 5;
  middle.input_gradient_bytes = 2;
  costs[2].input_gradient_bytes = 7;
  costs[2].output_bytes = 100;  // nobody takes it
  return costs;
}

// The last layer's W comes first, in two pieces.
std::vector<LayerCost> two_layers() {
  return {{.forward = 1,
           .backward_p1 = 1,
           .backward_p2 = 1,
           .p2_units = 1,
           .forward_peak = 5,
           .forward_held = 4,
           .p1_peak = 3,
           .p1_held = -2,
           .stash = 6,
           .p2_peak = 1},
          {.forward = 3,
           .backward_p1 = 1,
           .backward_p2 = 2,
           .p2_units = 2,
           .forward_peak = 9,
           .forward_held = 2,
           .p1_peak = 7,
           .p1_held = 1,
           .stash = 8,
           .p2_peak = 2}};
}

std::vector<StageModel> models(const std::vector<StageCost>& costs, bool has_backward = true) {
  return stage_models(empty_schedule({0, 1, 2}, 1), costs, has_backward);
}

TEST(StageModel, SharesSecondsByWeight) {
  auto costs = three_stages();
  costs[1].layers = two_layers();
  for (LayerCost& layer : costs[1].layers) {
    layer.forward /= 10;
    layer.backward_p1 = layer.backward_p2 = 0;
  }
  StageModel middle = models(costs)[1];
  expect_growth(middle.forward.steps[0], 2, 5, 4);
  expect_growth(middle.forward.steps[1], 6, 9, 2);
  // Without weights all layers are equal, and all pieces of W.
  expect_growth(middle.backward_p1.steps[0], 2, 7, 1);
  expect_growth(middle.backward_p1.steps[1], 2, 3, -2);
  for (int piece = 0; piece <= 3; ++piece) EXPECT_DOUBLE_EQ(middle.pieces[piece].begin, 4 * piece);
  // A layer without W takes no part of its time.
  costs[1].layers[0].p2_units = 0;
  costs[1].layers[0].backward_p2 = 5;
  costs[1].layers[0].stash = 0;
  costs[1].layers[1].backward_p2 = 1;
  middle = models(costs)[1];
  ASSERT_EQ(middle.p2_units(), 2);
  expect_piece(middle.pieces[1], 6, 4, 2);
  expect_piece(middle.pieces[2], 12, 8, 0);
  expect_growth(middle.backward.steps[0], 2 + 12, 7, 1 - 8);
  expect_growth(middle.backward.steps[1], 2, 3, -2);
  // Without any W there is none of its time either.
  costs[1].layers[1].p2_units = 0;
  costs[1].layers[1].stash = 0;
  middle = models(costs)[1];
  EXPECT_EQ(middle.p2_units(), 0);
  EXPECT_EQ(middle.p2_seconds, 0);
  EXPECT_EQ(middle.largest_p2, 0);
}

TEST(StageModel, KeepsNothingWithoutABackward) {
  auto costs = three_stages();
  costs[1].layers = two_layers();
  const auto all = models(costs, false);
  // The output replaces the input, which is 3. The most within a layer is 9.
  expect_growth(all[1].forward.whole, 8, 9, 5 - 3);
  ASSERT_EQ(all[1].forward.steps.size(), 1U);
  EXPECT_EQ(all[1].forward.whole.need, 9);
  // The last output is not sent. F has room in its input.
  expect_growth(all[2].forward.whole, 1, 0, -5);
}

// Streamed gradients: each piece of W with its own seconds, stash and gradient, which is that beyond the ones made in
// I.
TEST(StageModel, RunsSmallGradientsFirst) {
  auto costs = three_stages();
  costs[1].layers = two_layers();
  costs[1].layers[0].gradient_bytes = costs[1].layers[0].streamed_gradient = 10;
  costs[1].layers[1].gradient_bytes = 30;
  costs[1].layers[1].streamed_gradient = 25;  // during its first piece
  costs[1].layers[1].p1_gradient = 3;
  const auto expect_pieces = [&](const std::vector<bool>& smallest_first, const std::vector<double>& gradients,
                                 const std::vector<double>& freed) {
    const auto all = stage_models(empty_schedule({0, 1, 2}, 1), costs, true, smallest_first);
    const std::vector<P2Piece>& pieces = all[1].pieces;
    ASSERT_EQ(pieces.size(), 4U);
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(pieces[i].gradient, gradients[i]) << i;
      EXPECT_EQ(pieces[i].freed, freed[i]) << i;
      EXPECT_DOUBLE_EQ(pieces[i].begin, costs[1].backward_p2 * static_cast<double>(i) / 3) << i;
    }
  };
  expect_pieces({}, {22, 5, 10 - 3, 0}, {0, 4, 8, 14});  // those of the other layer's I are applied then
  expect_pieces({true, true, true}, {5, 10, 22, 0}, {0, 4, 10, 14});
  costs[1].layers[1].streamed_stash = 7;  // of 8
  expect_pieces({true, true, true}, {5, 10, 22, 0}, {0, 1, 7, 14});
  costs[1].layers[1].streamed_gradient = 30;  // a layer whose gradients are applied together, after its last piece
  costs[1].layers[1].streamed_unit = 1;
  expect_pieces({true, true, true}, {10, 13.5, 27, 0}, {0, 6, 7, 14});
}

TEST(StageModel, OfEachSlice) {
  std::vector<StageCost> costs(4);  // two stages of slice 0, then of slice 1
  for (int i = 0; i < 4; ++i) {
    costs[i].activation_bytes = 10;
    costs[i].output_bytes = i + 1;
    costs[i].input_gradient_bytes = i + 5;
  }
  const auto all = stage_models(empty_schedule({0, 1}, 2), costs, true);
  ASSERT_EQ(all.size(), 4U);
  EXPECT_EQ(all[2].output, 3);
  EXPECT_EQ(all[3].output, 0) << "the last stage";
  EXPECT_EQ(all[2].input_gradient, 0) << "the first stage";
  EXPECT_EQ(all[3].input_gradient, 8);
  EXPECT_EQ(all[2].forward.whole.held, 10 + 3);
  EXPECT_EQ(all[3].forward.whole.held, 10 - 3);
  EXPECT_EQ(all[2].backward.whole.held, -10 - 8);
}

}  // namespace
}  // namespace twobp::TWOBP_FILE
