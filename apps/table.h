// Prints tables as text.
#pragma once

#include <string>
#include <vector>

#include "twobp/core/text.h"  // the cells are made with these functions

namespace twobp {

// Columns are as wide as their widest entry. The first is left-aligned, the others are right-aligned.
void print_table(std::vector<std::vector<std::string>> rows);

}  // namespace twobp
