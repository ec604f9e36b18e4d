// The placement of stages on ranks. Only this file does arithmetic with rank numbers.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace twobp {

enum class Placement : uint8_t {
  kLinear,  // stage s on rank s
  kLooped,  // stage s on rank s mod N: the model goes round the ranks several times ("interleaved")
  kV,       // two stages on each rank, down and back up: rank r has stages r and 2N - 1 - r
};
// "linear", "looped", "v".
std::string_view placement_name(Placement placement);

// The default number of stages on each rank: 1, 2, 2.
int usual_stages_per_rank(Placement placement);

// Whether `stages` divide into `ranks` as the placement requires: linear one stage on each rank, V two, looped any
// whole number.
bool placement_fits(Placement placement, int stages, int ranks);

// The rank of each stage. Throws Error unless placement_fits.
std::vector<int> place_stages(Placement placement, int stages, int ranks);

}  // namespace twobp
