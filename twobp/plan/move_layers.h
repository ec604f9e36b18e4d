// Improves a split by simulation. A split that balances seconds need not be the fastest if ranks wait for each other or
// memory forces W early.
#pragma once

#include <functional>
#include <optional>
#include <vector>

namespace twobp {

// Seconds of a step with this many layers in each stage; nullopt if it does not fit.
using SecondsOfSplit = std::function<std::optional<double>(const std::vector<int>& split)>;

// Improves `split`, which takes `seconds`. Moves one layer across one boundary between stages, or one across each of
// two boundaries, until no such move is faster or `most` splits have been tried. Every stage keeps a layer.
// Deterministic. The result is never slower than `split`, but often not the best of all.
std::vector<int> move_layers(std::vector<int> split, double seconds, int most, const SecondsOfSplit& seconds_of);

}  // namespace twobp
