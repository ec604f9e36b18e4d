#include "apps/table.h"

#include <algorithm>
#include <iomanip>
#include <iostream>

namespace twobp {

void print_table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()), 0);
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) {
      std::cout << (i > 0 ? "  " : "") << (i > 0 ? std::right : std::left)
                << std::setw(static_cast<int>(widths[i])) << row[i];
    }
    std::cout << '\n';
  }
}

}  // namespace twobp
