// The bytes of layers as functions of a micro-batch's size, from profiles at a few sizes.
#pragma once

#include <vector>

#include "twobp/pipeline/profile/profile.h"

namespace twobp {

// How large a micro-batch is.
struct BatchSize {
  double numbers = 0;  // in all fields
  double squares = 0;  // these times the positions of its sequences, as the scores of attention grow
  bool operator==(const BatchSize&) const = default;
};
BatchSize size_of(const Fields& micro_batch);
// Each number is the larger of both.
BatchSize larger(const BatchSize& a, const BatchSize& b);

class ProfilesBySize {
 public:
  // All micro-batches have one size.
  explicit ProfilesBySize(std::vector<Profile> slices) : ProfilesBySize(std::move(slices), {}) {}
  // `slices` was measured on a micro-batch of this size, in slices or as a whole.
  ProfilesBySize(std::vector<Profile> slices, const BatchSize& size) : points_{{size, std::move(slices)}} {}

  bool one_size() const { return points_.front().size.numbers == 0; }
  const BatchSize& first() const { return points_.front().size; }
  // Whether the bytes of larger micro-batches of this size can be told from what was measured.
  bool covers(const BatchSize& size) const;
  void add(Profile profile, const BatchSize& size) { points_.push_back({size, {std::move(profile)}}); }

  // The profiles of the slices for micro-batches of this size. Bytes are a sum of three terms: one in proportion to the
  // numbers, one to the squares, and a constant, as far as the measured sizes tell them apart. Seconds, and the bytes
  // of weights, are those of the first size.
  std::vector<Profile> at(const BatchSize& size) const;

 private:
  struct Point {
    BatchSize size;
    std::vector<Profile> slices;
  };
  std::vector<Point> points_;
};

}  // namespace twobp
