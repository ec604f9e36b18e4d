// How pending W of one layer runs if several micro-batches are due together.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace twobp {

enum class P2Batching : uint8_t {
  kLoop,    // one call each
  kConcat,  // one call, which gathers their rows by copying (nn/kernels/products/concatenate_rows.h)
};
std::string_view batching_name(P2Batching batching);
// Throws Error, which suggests the nearest name.
P2Batching parse_batching(std::string_view name);
std::vector<std::string> batching_names();

}  // namespace twobp
