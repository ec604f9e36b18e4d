// Arguments of kernels on rows that all versions of them share: masks of dropout, and gates.
#pragma once

#include <cstdint>

namespace twobp {

// Determines which numbers are dropped. Probabilities are multiples of 2^-16. Numbers that are kept are multiplied by 1
// / (1 - p) of the rounded probability, so the mean is exact.
struct DropoutMask {
  uint32_t key[2] = {0, 0};  // from seed, step and the layer's name
  uint32_t micro_batch = 0;
  uint32_t threshold = 0;  // p * 2^16: a number is dropped if its 16 random bits are below this
  double scale = 1;        // factor of the numbers that are kept

  // With slices, rows are positions of the samples, and this call has the positions [first, first + length) of their
  // `positions`. So the mask is that of the whole sequences. 0: all positions.
  uint32_t length = 0;
  uint32_t first = 0;
  uint32_t positions = 0;

  // The row of the mask for a row of this call.
  constexpr uint32_t row(uint32_t here) const {
    return length == 0 ? here : here / length * positions + first + here % length;
  }
};

// Squares are summed in blocks of so many numbers, each of which has the same sum wherever its tensor begins or ends.
inline constexpr int64_t kSquareBlock = 4096;

// The activations of gated linear units.
enum class Gate : uint8_t { kSilu, kGelu, kGeluTanh };

}  // namespace twobp
