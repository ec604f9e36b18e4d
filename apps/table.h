// Tables as text.
#pragma once

#include <string>
#include <vector>

#include "twobp/core/figures.h"  // what stands in them

namespace twobp {

// Columns as wide as their widest entry; the first to the left, numbers to the right.
void print_table(const std::vector<std::vector<std::string>>& rows);

}  // namespace twobp
