#include "twobp/pipeline/profile/by_size.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace twobp {
namespace {

constexpr size_t kMostPoints = 8;
constexpr size_t kTerms = 3;
// Measured bytes hold up to so many times the largest measured size. One point does not tell how bytes grow.
constexpr double kBeyondOne = 1.05;
constexpr double kBeyondMore = 1.5;
constexpr double kAlike = 1e-3;  // of a term that is nearly a multiple of others: the sine of the angle, squared

constexpr std::array kBytes = {&LayerCost::forward_peak, &LayerCost::forward_held,  &LayerCost::p1_peak,
                               &LayerCost::p1_held,      &LayerCost::stash,         &LayerCost::p2_peak,
                               &LayerCost::output,       &LayerCost::input_gradient};

using Terms = std::array<double, kTerms>;

Terms terms_of(const BatchSize& size, const BatchSize& unit) {
  return {size.numbers / unit.numbers, size.squares / unit.squares, 1};
}

// The factors of measured values in the value at a size: least squares of relative errors.
class Fit {
 public:
  Fit(const std::vector<BatchSize>& sizes, const BatchSize& at) {
    constexpr size_t n = kTerms;
    std::vector<Terms> rows;
    for (const BatchSize& size : sizes) {
      rows.push_back(terms_of(size, sizes.front()));
      const double weight = 1 / rows.back()[0];
      for (double& term : rows.back()) term *= weight;
      weights_.push_back(weight);
    }
    // The normal equations and the terms at the size, solved for them: `square` x = asked.
    std::array<Terms, n> square{};
    for (const Terms& row : rows) {
      for (size_t i = 0; i < n; ++i) {
        for (size_t j = 0; j < n; ++j) square[i][j] += row[i] * row[j];
      }
    }
    const Terms diagonal = {square[0][0], square[1][1], square[2][2]};
    Terms asked = terms_of(at, sizes.front());
    std::array<bool, n> used{};
    for (size_t i = 0; i < n; ++i) {
      used[i] = square[i][i] > kAlike * diagonal[i];
      if (!used[i]) continue;
      for (size_t k = 0; k < n; ++k) {
        if (k == i) continue;
        const double factor = square[k][i] / square[i][i];
        for (size_t j = 0; j < n; ++j) square[k][j] -= factor * square[i][j];
        asked[k] -= factor * asked[i];
      }
    }
    for (const Terms& row : rows) {
      double factor = 0;
      for (size_t i = 0; i < n; ++i) {
        if (used[i]) factor += row[i] * asked[i] / square[i][i];
      }
      factors_.push_back(factor);
    }
  }

  double value(const std::vector<double>& measured) const {
    double sum = 0;
    for (size_t i = 0; i < measured.size(); ++i) sum += factors_[i] * weights_[i] * measured[i];
    return sum;
  }

 private:
  std::vector<double> weights_;
  std::vector<double> factors_;
};

}  // namespace

BatchSize size_of(const Fields& micro_batch) {
  BatchSize size;
  int64_t positions = 1;
  for (const auto& [name, tensor] : micro_batch) {
    size.numbers += static_cast<double>(tensor.numel());
    if (tensor.dim() > 1) positions = std::max(positions, tensor.size(1));
  }
  size.squares = size.numbers * static_cast<double>(positions);
  return size;
}

BatchSize larger(const BatchSize& a, const BatchSize& b) {
  return {std::max(a.numbers, b.numbers), std::max(a.squares, b.squares)};
}

bool ProfilesBySize::covers(const BatchSize& size) const {
  if (points_.size() >= kMostPoints) return true;
  BatchSize most;
  for (const Point& point : points_) most = larger(most, point.size);
  const double beyond = points_.size() == 1 ? kBeyondOne : kBeyondMore;
  return size.numbers <= beyond * most.numbers && size.squares <= beyond * most.squares;
}

std::vector<Profile> ProfilesBySize::at(const BatchSize& size) const {
  std::vector<Profile> result = points_.front().slices;
  if (one_size() || size == first()) return result;
  const auto distance = [&](const Point* point) {
    const Terms ratio = terms_of(point->size, size);
    return std::abs(std::log(ratio[0])) + std::abs(std::log(ratio[1]));
  };
  std::vector<const Point*> nearest;
  for (const Point& point : points_) nearest.push_back(&point);
  std::ranges::stable_sort(nearest, {}, distance);
  nearest.resize(std::min(nearest.size(), kTerms));  // as many as terms, so that measured sizes have measured bytes
  std::vector<BatchSize> sizes;
  for (const Point* point : nearest) sizes.push_back(point->size);
  const Fit fit(sizes, size);
  for (size_t slice = 0; slice < result.size(); ++slice) {
    for (auto& [kind, cost] : result[slice]) {
      for (const auto bytes : kBytes) {
        std::vector<double> measured;
        for (const Point* point : nearest) measured.push_back(point->slices.at(slice).at(kind).*bytes);
        cost.*bytes = fit.value(measured);
      }
      for (const auto bytes : {&LayerCost::stash, &LayerCost::p2_peak, &LayerCost::output, &LayerCost::input_gradient})
        cost.*bytes = std::max(0.0, cost.*bytes);
      cost.forward_peak = std::max({0.0, cost.forward_held, cost.forward_peak});
      cost.p1_peak = std::max({0.0, cost.p1_held, cost.p1_peak});
    }
  }
  return result;
}

}  // namespace twobp
