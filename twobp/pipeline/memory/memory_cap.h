// The byte cap: the most bytes of activations and stash that a rank may hold. To stay below, it runs old W first.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>

namespace twobp {

// A number of bytes, the same for every rank, or automatic. The automatic cap is the total that standard
// backpropagation needs on its fullest rank, times a factor, less the rank's own parameters, gradients and optimizer
// state.
class MemoryCap {
 public:
  constexpr MemoryCap(int64_t bytes)  // NOLINT(google-explicit-constructor): a cap is a number of bytes
      : MemoryCap(bytes, 0) {}
  static constexpr MemoryCap none() { return {0, 0}; }
  static constexpr MemoryCap automatic(double times = 1) { return {0, times}; }

  bool is_automatic() const { return times_ > 0; }
  int64_t bytes() const { return bytes_; }  // 0 if automatic
  double times() const { return times_; }   // 0 unless automatic
  bool operator==(const MemoryCap&) const = default;

 private:
  constexpr MemoryCap(int64_t bytes, double times) : bytes_(bytes), times_(times) {}

  int64_t bytes_;
  double times_;
};

// As in pipeline.memory_cap: "auto", "1.05x", "1000000".
inline std::ostream& operator<<(std::ostream& out, const MemoryCap& cap) {
  if (!cap.is_automatic()) return out << cap.bytes();
  if (cap.times() == 1) return out << "auto";
  return out << cap.times() << 'x';
}

// pipeline.memory_cap: "auto", "1.05x" -> MemoryCap::automatic(); "0" -> no cap; "512MiB", "1000000" -> bytes. Throws
// Error otherwise.
MemoryCap parse_memory_cap(const std::string& text);
// pipeline.bucket: "25MiB", "1000000" -> bytes, at least 1. Throws Error otherwise.
int64_t parse_bucket(const std::string& text);

}  // namespace twobp
