// A split by simulation: the one that balances seconds need not be the fastest, where ranks wait for each
// other or a memory forces W early.
#pragma once

#include <functional>
#include <optional>
#include <vector>

namespace twobp {

// Seconds of a step with so many layers in each stage; nullopt where that does not fit.
using SecondsOfSplit = std::function<std::optional<double>(const std::vector<int>& split)>;

// From `split`, which takes `seconds`, to a faster one, by a layer moved across one boundary between stages
// or one across each of two, again and again, until none of these is faster or `most` have been tried. Every
// stage keeps a layer. Deterministic; never slower than `split`, often not the best of all.
std::vector<int> move_layers(std::vector<int> split, double seconds, int most,
                             const SecondsOfSplit& seconds_of);

}  // namespace twobp
