// The random masks of dropout, from a counter-based generator. A mask is a function of (seed, step, micro-batch, layer,
// row, column) alone, so backward-p1 recomputes it instead of keeping it.
#pragma once

#include <cstdint>

#include "twobp/nn/kernels/rows/row_arguments.h"

namespace twobp {

// What follows is for files that are compiled once per instruction set. It is local to each file, so that the linker
// cannot mix the copies.
namespace {

// Fills `words` with `groups` times four random words: words[i * groups + g] is word i of group first + g of a row.
// Philox4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, which finds no
// defect from 7 rounds on).
inline void random_words(const DropoutMask& mask, uint32_t row, uint32_t first, int64_t groups,
                         uint32_t* __restrict words) {
  constexpr uint64_t kMultiply0 = 0xD2511F53;
  constexpr uint64_t kMultiply1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9;
  constexpr uint32_t kWeyl1 = 0xBB67AE85;
  uint32_t* __restrict words1 = words + groups;
  uint32_t* __restrict words2 = words1 + groups;
  uint32_t* __restrict words3 = words2 + groups;
#pragma omp simd
  for (int64_t g = 0; g < groups; ++g) {
    uint32_t a = first + static_cast<uint32_t>(g);
    uint32_t b = row;
    uint32_t c = mask.micro_batch;
    uint32_t d = 0;
    uint32_t key0 = mask.key[0];
    uint32_t key1 = mask.key[1];
#pragma GCC unroll 7
    for (int round = 0; round < 7; ++round) {
      const uint64_t product0 = kMultiply0 * a;
      const uint64_t product1 = kMultiply1 * c;
      a = static_cast<uint32_t>(product1 >> 32) ^ b ^ key0;
      b = static_cast<uint32_t>(product1);
      c = static_cast<uint32_t>(product0 >> 32) ^ d ^ key1;
      d = static_cast<uint32_t>(product0);
      key0 += kWeyl0;
      key1 += kWeyl1;
    }
    words[g] = a;
    words1[g] = b;
    words2[g] = c;
    words3[g] = d;
  }
}

// Calls body(column, keep) for the first `used` columns of a row that has `cols`. `keep` is 0 or mask.scale. There are
// two loops, so that the compiler vectorises them. Eight columns share a group; the first half of a chunk takes the
// lower 16 bits.
template <typename T, typename Body>
inline void for_each_kept(const DropoutMask& mask, uint32_t row, int64_t cols, int64_t used, Body&& body) {
  constexpr int64_t kChunk = 1024;
  uint32_t words[kChunk / 2];
  row = mask.row(row);
  const T scale = static_cast<T>(mask.scale);
  const uint32_t threshold = mask.threshold;
  for (int64_t begin = 0; begin < used; begin += kChunk) {
    const int64_t count = cols - begin < kChunk ? cols - begin : kChunk;
    const int64_t groups = (count + 7) / 8;
    random_words(mask, row, static_cast<uint32_t>(begin / 8), groups, words);
    const int64_t half = count < 4 * groups ? count : 4 * groups;
    const int64_t end = count < used - begin ? count : used - begin;
    const int64_t lower = half < end ? half : end;
#pragma omp simd
    for (int64_t c = 0; c < lower; ++c) {
      body(begin + c, (words[c] & 0xffff) >= threshold ? scale : T(0));
    }
#pragma omp simd
    for (int64_t c = half; c < end; ++c) {
      body(begin + c, (words[c - half] >> 16) >= threshold ? scale : T(0));
    }
  }
}

}  // namespace

}  // namespace twobp
