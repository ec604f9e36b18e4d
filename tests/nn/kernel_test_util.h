// Helpers for tests of kernels: the kernels for every instruction set that this CPU supports, buffers with a guard, and
// comparison within a number of roundings.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "twobp/nn/kernels/instruction_sets.h"
#include "twobp/nn/kernels/rows/row_kernels.h"

namespace twobp {

namespace test {

using Real = long double;

// The kernels of one family for one instruction set.
template <template <typename...> class Family>
struct KernelSetOf {
  std::string name;
  const Family<float>* of_float;
  const Family<double>* of_double;
  bool supported;  // by this CPU
};
using KernelSet = KernelSetOf<Kernels>;

template <template <typename...> class Family>
std::vector<KernelSetOf<Family>> kernel_sets(const KernelTables<Family>& tables) {
  const auto set = [](const char* name, const KernelTable<Family>& table, bool supported) {
    return KernelSetOf<Family>{name, &table.of_float, &table.of_double, supported};
  };
  return {set("baseline", tables.baseline, true), set("avx2", tables.avx2, supports(InstructionSet::kAvx2)),
          set("avx512", tables.avx512, supports(InstructionSet::kAvx512))};
}

// For tests with every instruction set, in float and double. Those that this CPU lacks are skipped.
template <template <typename...> class Family>
class KernelFamilyTest : public testing::TestWithParam<KernelSetOf<Family>> {
 protected:
  void SetUp() override {
    if (!this->GetParam().supported) GTEST_SKIP() << "this CPU has no " << this->GetParam().name;
  }
  // Calls body(kernels) for float and for double.
  template <typename Body>
  void for_each_type(Body&& body) {
    {
      SCOPED_TRACE("float");
      body(*this->GetParam().of_float);
    }
    SCOPED_TRACE("double");
    body(*this->GetParam().of_double);
  }
};

// Numbers one element off alignment, followed by a guard that must not be written.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t size, uint64_t seed = 0, double scale = 1) : size_(size), all_(size + 1 + kGuard, kMark) {
    std::mt19937_64 engine(seed);
    std::normal_distribution<double> normal(0, scale);
    for (int64_t i = 0; i < size; ++i) data()[i] = static_cast<T>(normal(engine));
  }
  T* data() { return all_.data() + 1; }
  const T* data() const { return all_.data() + 1; }
  T& operator[](int64_t i) { return data()[i]; }
  Real operator[](int64_t i) const { return static_cast<Real>(data()[i]); }
  int64_t size() const { return size_; }
  bool guard_intact() const {
    if (all_[0] != kMark) return false;
    for (int64_t i = size_ + 1; i < static_cast<int64_t>(all_.size()); ++i) {
      if (all_[i] != kMark) return false;
    }
    return true;
  }
  bool operator==(const Buffer&) const = default;

 private:
  static constexpr int64_t kGuard = 32;
  static constexpr T kMark = T(12345);
  int64_t size_;
  std::vector<T> all_;
};

// Checks that every element is within `roundings` roundings of `size` of the expected one.
template <typename T>
void expect_close(const Buffer<T>& actual, const std::vector<Real>& expected, double roundings, double size,
                  const std::string& what) {
  const Real bound = Real(roundings) * Real(std::numeric_limits<T>::epsilon() / 2) * Real(size);
  EXPECT_TRUE(actual.guard_intact()) << what << " was written past its end";
  ASSERT_EQ(actual.size(), static_cast<int64_t>(expected.size())) << what;
  for (int64_t i = 0; i < actual.size(); ++i) {
    ASSERT_TRUE(std::abs(actual[i] - expected[i]) <= bound)
        << what << "[" << i << "] is " << actual[i] << ", expected " << expected[i] << " within " << bound;
  }
}

inline double largest(const std::vector<Real>& values) {
  Real most = 0;
  for (const Real v : values) most = std::max(most, std::abs(v));
  return static_cast<double>(most);
}

struct Shape {
  int64_t rows;
  int64_t cols;
};
inline const std::vector<Shape> kShapes = {{1, 1},  {3, 2},  {2, 7},   {3, 8},  {2, 15},
                                           {5, 17}, {1, 64}, {67, 33}, {2, 515}};

}  // namespace test
}  // namespace twobp
