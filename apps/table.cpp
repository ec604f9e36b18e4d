#include "apps/table.h"

#include <algorithm>

#include "apps/print.h"
#include "twobp/core/text.h"

namespace twobp {

void print_table(std::vector<std::vector<std::string>> rows) {
  std::vector<size_t> widths;
  for (auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()), 0);
    for (size_t i = 0; i < row.size(); ++i) {
      row[i] = printable(row[i]);  // a name with a newline would look like a row of its own
      widths[i] = std::max(widths[i], row[i].size());
    }
  }
  std::string text;
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string space(widths[i] - row[i].size(), ' ');
      text += i > 0 ? "  " + space + row[i] : row[i] + space;
    }
    text += '\n';
  }
  print_as_is(text);
}

}  // namespace twobp
