// The time that a thread has spent in matrix products and convolutions. These are the fast part of a training step; the
// rest is passes over memory.
#pragma once

#include <cstdint>

namespace twobp {

struct ProductTime {
  double seconds = 0;
  double operations = 0;  // additions and multiplications

  ProductTime operator-(const ProductTime& other) const {
    return {seconds - other.seconds, operations - other.operations};
  }
  ProductTime& operator+=(const ProductTime& other) {
    seconds += other.seconds;
    operations += other.operations;
    return *this;
  }
};

// Returns the time of the calling thread since it began. The work of its helper threads within attention is not
// included.
ProductTime product_time();

// Adds that of another thread, which worked for this one.
void add_product_time(const ProductTime& time);

// Adds the additions and multiplications of products that no timer sees: those of attention by operators and by fused
// kernels.
void count_operations(double operations);

// Times one product for as long as this object lives. Timers must not be nested.
class ProductTimer {
 public:
  explicit ProductTimer(double operations);
  // (m, k) @ (k, n).
  ProductTimer(int64_t m, int64_t n, int64_t k)
      : ProductTimer(2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k)) {}
  ~ProductTimer();
  ProductTimer(const ProductTimer&) = delete;
  ProductTimer& operator=(const ProductTimer&) = delete;

 private:
  double begin_;
};

}  // namespace twobp
